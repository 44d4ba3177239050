# SPDX-License-Identifier: Apache-2.0
"""True epsilons by enumeration of all outcomes of the equations, against the formulas."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedrec.perturb.targeted.config import TargetedConfig
from fedrec.perturb.targeted.guarantee import guarantee, words
from fedrec.perturb.targeted.mechanisms import Interaction, coin_flip, randomised_response

INF = math.inf


def config(epsilon, mechanism="coin-flip", budget=0.0):
    return TargetedConfig(attribute="gender", epsilon=epsilon, mechanism=mechanism, budget=budget)


def coin_flip_outcomes(profile, num_items, epsilon, *, values=1):
    """Probability of each published set (multiset) of (item, value), by all branches of equation
    2."""
    keep = math.exp(epsilon) / (math.exp(epsilon) + 1)
    own = {item for item, _ in profile}
    free = [item for item in range(num_items) if item not in own]
    fakes = list(itertools.product(itertools.product(free, range(values)), repeat=len(profile)))
    found = Counter()
    for flips in itertools.product([False, True], repeat=len(profile)):
        chance = math.prod(1 - keep if flip else keep for flip in flips)
        for chosen in fakes:
            out = [
                new if flip else old for flip, old, new in zip(flips, profile, chosen, strict=True)
            ]
            found[tuple(sorted(out))] += chance / len(fakes)
    return found


def response_outcomes(profile, num_items, epsilon, *, values=1):
    domain = list(itertools.product(range(num_items), range(values)))
    other = 1 / (math.exp(epsilon) + len(domain) - 1)
    found = Counter()
    for out in itertools.product(domain, repeat=len(profile)):
        same = [new == old for old, new in zip(profile, out, strict=True)]
        found[tuple(sorted(out))] += math.prod(
            math.exp(epsilon) * other if kept else other for kept in same
        )
    return found


def worst(one, other):
    """The smallest epsilon that holds for this pair."""
    return max(
        math.log(p / other[out]) if other[out] > 0 else INF for out, p in one.items() if p > 0
    )


def enumerated(outcomes, num_items, size, differ, values=1):
    """The smallest epsilon over all pairs of profiles that differ in at most `differ` places."""
    every = list(itertools.combinations(range(num_items), size))
    profiles = [
        tuple(zip(items, rated, strict=True))
        for items in every
        for rated in itertools.product(range(values), repeat=size)
    ]
    tables = {profile: outcomes(profile) for profile in profiles}
    return max(
        worst(tables[a], tables[b])
        for a, b in itertools.permutations(profiles, 2)
        if len(set(a) - set(b)) <= differ
    )


@pytest.mark.parametrize("num_items", [2, 3, 6])
@pytest.mark.parametrize("epsilon", [0.1, 3.0])
def test_one_slot_gives_epsilon_plus_ln_m(num_items, epsilon):
    true = enumerated(lambda p: coin_flip_outcomes(p, num_items, epsilon), num_items, 1, 1)
    assert true == pytest.approx(epsilon + math.log(num_items - 1))
    found = guarantee(config(epsilon), num_items=num_items, own_items=1, rows=1, protected=1)
    assert (found.nominal, found.odds) == pytest.approx((epsilon, true))
    assert (found.slot, found.item, found.profile) == pytest.approx((true, true, true))


@pytest.mark.parametrize("num_items", [3, 6])
def test_two_slots_with_independent_fakes_have_no_finite_epsilon(num_items):
    assert enumerated(lambda p: coin_flip_outcomes(p, num_items, 0.1), num_items, 2, 1) == INF
    found = guarantee(config(0.1), num_items=num_items, own_items=2, rows=2, protected=2)
    assert (found.item, found.profile) == (INF, INF)
    assert found.slot == pytest.approx(0.1 + math.log(num_items - 2))


def test_with_random_ratings_even_one_slot_has_no_finite_epsilon():
    """Items 0 and 1 with one of two ratings; (1, 1) is a possible fake of the first and impossible
    for the second."""
    epsilon, values = 0.5, 2
    one = coin_flip_outcomes(((0, 1),), 3, epsilon, values=values)
    other = coin_flip_outcomes(((1, 0),), 3, epsilon, values=values)
    assert other[((1, 1),)] == 0 < one[((1, 1),)]
    found = guarantee(
        config(epsilon), num_items=3, own_items=1, rows=1, protected=1, num_values=values
    )
    assert math.exp(found.odds) == pytest.approx(one[((0, 1),)] / other[((0, 1),)])
    true = enumerated(lambda p: coin_flip_outcomes(p, 3, epsilon, values=values), 3, 1, 1, values)
    assert found.slot == found.item == found.profile == true == INF == worst(one, other)


@pytest.mark.parametrize("values", [1, 2])
@pytest.mark.parametrize("num_items", [2, 3, 6])
def test_randomised_response_gives_epsilon_for_an_item_and_its_multiple_for_a_profile(
    num_items, values
):
    epsilon = 0.7
    one = config(epsilon, "randomised-response")
    true = enumerated(
        lambda p: response_outcomes(p, num_items, epsilon, values=values), num_items, 1, 1, values
    )
    found = guarantee(one, num_items=num_items, own_items=1, rows=1, protected=1, num_values=values)
    assert (found.slot, found.item, found.profile) == pytest.approx((epsilon, true, true))
    assert true == pytest.approx(epsilon)


def test_randomised_response_of_two_slots():
    epsilon = 0.7

    def outcomes(profile):
        return response_outcomes(profile, 6, epsilon)

    found = guarantee(
        config(epsilon, "randomised-response"), num_items=6, own_items=2, rows=2, protected=2
    )
    assert enumerated(outcomes, 6, 2, 1) <= found.item + 1e-9
    assert enumerated(outcomes, 6, 2, 2) <= found.profile + 1e-9
    # With both slots exchanged, the ordered slots attain the sum, and the published set nearly
    # does.
    ordered = {
        out: math.exp(epsilon * ((out[0] == 0) + (out[1] == 1)))
        for out in itertools.product(range(6), repeat=2)
    }
    moved = {out: math.exp(epsilon * ((out[0] == 2) + (out[1] == 3))) for out in ordered}
    assert max(math.log(ordered[out] / moved[out]) for out in ordered) == pytest.approx(
        found.profile
    )


@pytest.mark.parametrize("mechanism", ["coin-flip", "randomised-response"])
@pytest.mark.parametrize("select", ["stereotypical", "random"])
def test_an_unprotected_interaction_is_published_unchanged(mechanism, select):
    """Half of two rows is protected: the item of higher number (the more stereotypical one), or
    either."""

    def outcomes(profile):
        found = Counter()
        slots = [1] if select == "stereotypical" else [0, 1]
        for slot in slots:
            if mechanism == "coin-flip":
                keep = math.exp(1.0) / (math.exp(1.0) + 1)
                others = [item for item in range(6) if (item, 0) not in profile]
            else:
                keep = math.exp(1.0) / (math.exp(1.0) + 5)
                others = [item for item in range(6) if item != profile[slot][0]]
            for item in [profile[slot][0], *others]:
                out = list(profile)
                out[slot] = (item, 0)
                chance = keep if item == profile[slot][0] else (1 - keep) / len(others)
                found[tuple(sorted(out))] += chance / len(slots)
        assert sum(found.values()) == pytest.approx(1)
        return found

    assert enumerated(outcomes, 6, 2, 1) == INF
    found = guarantee(
        config(1.0, mechanism, budget=0.5), num_items=6, own_items=2, rows=2, protected=1
    )
    assert (found.item, found.profile) == (INF, INF)
    assert math.isfinite(found.slot)


def test_figures_of_the_poster():
    """ML-1M: 165 interactions, 3706 items, epsilon .1 and 3, with and without five rating
    values."""
    found = {
        (epsilon, values): guarantee(
            config(epsilon),
            num_items=3706,
            own_items=165,
            rows=165,
            protected=165,
            num_values=values,
        ).odds
        for epsilon in (0.1, 3.0)
        for values in (1, 5)
    }
    want = {(0.1, 1): 8.27, (0.1, 5): 9.88, (3.0, 1): 11.17, (3.0, 5): 12.78}
    assert found == pytest.approx(want, abs=0.005)


def test_words_name_what_does_not_hold():
    said = " ".join(words(config(0.1, budget=0.3)))
    for part in (
        "nominal epsilon 0.1",
        "epsilon + ln m",
        "no finite epsilon",
        "published as it is",
        "stereotypes",
    ):
        assert part in said
    assert "perturb.mechanism = 'randomised-response'" in said
    assert "ln m" not in " ".join(words(config(0.1, "randomised-response")))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_items=st.integers(2, 5),
    size=st.integers(1, 2),
    values=st.integers(1, 2),
    epsilon=st.floats(0.01, 5.0),
    mechanism=st.sampled_from(["coin-flip", "randomised-response"]),
)
def test_the_formulas_are_the_enumerated_likelihood_ratios(
    num_items, size, values, epsilon, mechanism
):
    assume(num_items > size)
    assume(num_items * values <= 8)

    def outcomes(profile):
        if mechanism == "coin-flip":
            return coin_flip_outcomes(profile, num_items, epsilon, values=values)
        return response_outcomes(profile, num_items, epsilon, values=values)

    sizes = {
        "num_items": num_items,
        "own_items": size,
        "rows": size,
        "protected": size,
        "num_values": values,
    }
    found = guarantee(config(epsilon, mechanism), **sizes)
    for differ, claimed in ((1, found.item), (size, found.profile)):
        true = enumerated(outcomes, num_items, size, differ, values)
        if mechanism == "coin-flip":
            assert claimed == pytest.approx(true)
        else:  # sums over ordered slots; the unordered set reveals slightly less
            assert true <= claimed + 1e-9 and (size > 1 or true == pytest.approx(claimed))


DRAWS = 6000


def drawn(profile, num_items, epsilon, mechanism, values):
    """Frequencies of the published sets, by the product's code."""
    random, found = np.random.default_rng(profile[1][0]), Counter()
    items, rated = (np.array(part) for part in zip(*profile, strict=True))
    real = Interaction(items, rated if values > 1 else None)
    sizes = {"num_items": num_items, "num_values": values, "epsilon": epsilon, "random": random}
    for _ in range(DRAWS):
        if mechanism == "randomised-response":
            out = randomised_response(real, **sizes)
        else:
            out = coin_flip(real, np.unique(items), **sizes)
        told = out.values.tolist() if out.values is not None else [0] * len(items)
        found[tuple(sorted(zip(out.items.tolist(), told, strict=True)))] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["coin-flip", "randomised-response"])
@pytest.mark.parametrize(("num_items", "values"), [(5, 1), (4, 2)])
def test_published_sets_are_as_likely_as_enumerated(mechanism, num_items, values):
    """For two slots, the log of a likelihood ratio from frequencies agrees with enumeration within
    its error."""
    epsilon, profiles = 0.9, (((0, 0), (2, values - 1)), ((0, 0), (3, values - 1)))
    seen, exact = [], []
    for profile in profiles:
        if mechanism == "randomised-response":
            exact.append(response_outcomes(profile, num_items, epsilon, values=values))
        else:
            exact.append(coin_flip_outcomes(profile, num_items, epsilon, values=values))
        seen.append(drawn(profile, num_items, epsilon, mechanism, values))
        possible = [out for out, chance in exact[-1].items() if chance > 0]
        assert set(seen[-1]) <= set(possible)
        expected = [DRAWS * exact[-1][out] for out in possible]
        assert chisquare([seen[-1][out] for out in possible], expected).pvalue > 1e-4
    both = [out for out in exact[0] if min(DRAWS * exact[0][out], DRAWS * exact[1][out]) > 50]
    assert both
    for out in both:
        error = math.sqrt(sum((1 - own[out]) / (DRAWS * own[out]) for own in exact))
        ratio, true = math.log(seen[0][out] / seen[1][out]), math.log(exact[0][out] / exact[1][out])
        assert abs(ratio - true) < 5 * error
