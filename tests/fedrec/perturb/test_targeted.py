# SPDX-License-Identifier: Apache-2.0
"""Targeted perturbation: mechanisms, profiles, selection and guarantee."""

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedrec.data.perturbation import TrainingData
from fedrec.data.population import Population
from fedrec.errors import DataError, ExperimentError
from fedrec.experiment.schema import load
from fedrec.perturb import targeted
from fedrec.perturb.targeted import TargetedConfig

# The mechanisms follow the equations: frequencies of all outcomes against their probabilities.

DRAWS = 20_000


@pytest.mark.parametrize("num_values", [1, 3])
def test_coin_flip_of_one_slot(num_values):
    """The client has items 1 and 4 of 6; the slot holds item 4 with the last value."""
    epsilon = 0.8
    real = np.full(DRAWS, 4 * num_values + num_values - 1)
    sizes = {"num_items": 6, "num_values": num_values, "epsilon": epsilon}
    code = targeted._coin_flip(real, np.array([1, 4]), random=np.random.default_rng(0), **sizes)
    keep = math.exp(epsilon) / (math.exp(epsilon) + 1)
    chance = np.zeros((6, num_values))
    chance[[0, 2, 3, 5]] = (1 - keep) / (4 * num_values)
    chance[4, -1] = keep
    seen = np.bincount(code, minlength=6 * num_values)
    assert (seen[chance.ravel() == 0] == 0).all()
    possible = chance.ravel() > 0
    assert chisquare(seen[possible], DRAWS * chance.ravel()[possible]).pvalue > 1e-4


@pytest.mark.parametrize("num_values", [1, 2])
def test_randomised_response_of_one_slot(num_values):
    epsilon, outcomes = 1.2, 5 * num_values
    code = targeted._randomised_response(
        np.full(DRAWS, 3 * num_values),
        num_items=5,
        num_values=num_values,
        epsilon=epsilon,
        random=np.random.default_rng(0),
    )
    chance = np.full(outcomes, 1 / (math.exp(epsilon) + outcomes - 1))
    chance[3 * num_values] *= math.exp(epsilon)
    assert chisquare(np.bincount(code, minlength=outcomes), DRAWS * chance).pvalue > 1e-4


SIZES = {"num_values": 1, "epsilon": 1.0, "random": np.random.default_rng(0)}


def test_a_client_without_unvisited_items_is_refused():
    with pytest.raises(DataError, match="unvisited"):
        targeted._coin_flip(np.arange(4), np.arange(4), num_items=4, **SIZES)


# Whole datasets: the perturbed users, the unchanged rows, and that devices train on the result.

TARGETED = ["perturb.name=targeted", "perturb.attribute=gender", "perturb.epsilon=0.1"]


def training(interactions, partition, rated=True):
    return TrainingData(
        interactions.with_rows(partition.train_rows), partition.training_clients, rated
    )


def done(world, *, with_ratings=True, **settings):
    """The training rows of the small world, and their perturbation."""
    data = training(world().interactions, world().partition, with_ratings)
    config = TargetedConfig.parse({"attribute": "gender", "epsilon": 0.1, **settings})
    return data, targeted._perturb_profiles(data, config, 7)


@pytest.mark.parametrize(("rated", "budget"), [(True, 0.0), (False, 0.0), (True, 1.0)])
def test_only_items_and_ratings_of_protected_rows_change(world, rated, budget):
    data, (learned, protected, _) = done(world, with_ratings=rated, budget=budget)
    assert (learned.users == data.rows.users).all()
    assert protected.tolist() == ([] if budget else list(range(len(data.rows))))
    assert (learned.items != data.rows.items).any() == (budget == 0)
    assert (learned.ratings != data.rows.ratings).any() == (rated and budget == 0)


def test_fakes_are_unvisited_and_ratings_are_of_the_scale(world):
    data = training(world().interactions, world().partition)
    real, config = data.rows, TargetedConfig(attribute="gender", epsilon=0.1)
    for seed in range(50):
        learned, *_ = targeted._perturb_profiles(data, config, seed)
        for row in range(len(real)):
            own = real.items[real.users == real.users[row]]
            assert learned.items[row] == real.items[row] or learned.items[row] not in own
        assert set(learned.ratings) <= set(real.ratings)


def test_each_client_has_its_own_stream(world):
    """A client's result does not depend on the other clients' data."""
    data, (learned, _, guarantees) = done(world, with_ratings=False, select="random")
    config = TargetedConfig(attribute="gender", epsilon=0.1, select="random")
    for client in guarantees:
        rows = np.flatnonzero(data.rows.users == client)
        own = dataclasses.replace(data, rows=data.rows.with_rows(rows))
        assert (targeted._perturb_profiles(own, config, 7)[0].items == learned.items[rows]).all()


def test_the_most_stereotypical_rows_are_protected(load_tiny):
    """By the shares of the training clients, and each user's own group."""
    population = Population.of(load_tiny())
    data, partition = population.interactions, population.partition
    rows = data.with_rows(partition.train_rows)
    gender = data.user_features["gender"].padded()[:, 0]
    trains = np.isin(np.arange(data.num_users), partition.training_clients)
    given, groups = trains[rows.users], np.where(trains, gender, -1)
    sizes = {"num_groups": 2, "num_items": data.num_items}
    shares = targeted._inclination(rows.users[given], rows.items[given], groups, **sizes)
    scores = targeted._stereotypicality(*shares)[gender[rows.users], rows.items]
    config = TargetedConfig(attribute="gender", epsilon=0.1, budget=0.6)
    _, protected, _ = targeted._perturb_profiles(training(data, partition), config, 0)
    taken = np.isin(np.arange(len(rows)), protected)
    for user in range(data.num_users):
        own = rows.users == user
        assert taken[own].sum() == -(-4 * own.sum() // 10)
        assert scores[own & taken].min() >= scores[own & ~taken].max()


def test_the_devices_learn_from_it_and_are_tested_on_the_truth(load_tiny):
    plain = Population.of(load_tiny())
    changed = Population.of(load_tiny(*TARGETED))
    clients = plain.evaluated_clients("test")
    assert (changed.evaluated_clients("test") == clients).all()
    for name in ("seen", "known", "relevant"):
        assert (
            getattr(plain.held_out(clients, "test"), name)
            == getattr(changed.held_out(clients, "test"), name)
        ).all()
    before, after = plain.client(0), changed.client(0)
    assert len(before.items) == len(after.items) and (before.items != after.items).any()
    assert (after.items == changed.perturbed.rows.items[changed.perturbed.rows.rows_of(0)]).all()
    assert set(after.positives) <= set(after.items) and (np.diff(after.positives) > 0).all()
    offsets, liked = changed.rows(np.array([0]), positive=True).lists
    assert sorted(liked[: offsets[1]]) == sorted(after.items[after.labels > 0])
    again = Population.of(load_tiny(*TARGETED))
    assert (again.client(0).items == after.items).all()  # the same in every round and on every node


def test_guarantees_are_those_of_each_client(world):
    given, (_, protected, guarantees) = done(world)
    data, values = given.rows, len(set(given.rows.ratings))
    for client, one in guarantees.items():
        own = data.items[data.users == client]
        sizes = {"own_items": len(set(own)), "rows": len(own), "num_values": values}
        sizes["protected"] = len(own)
        assert one == targeted._guarantee(config(0.1), num_items=6, **sizes)
    table = targeted._summary(np.ones(len(protected), bool), guarantees.values())
    assert (table["protected"], table["changed"]) == (len(data), 1)
    assert table["epsilon"]["true, whole profile"]["max"] == float("inf")


@pytest.mark.parametrize(
    ("attribute", "problem"), [("sex", "unknown user feature"), ("hobby", "several categories")]
)
def test_wrong_attributes_are_refused(world, attribute, problem):
    with pytest.raises(ExperimentError, match=problem):
        done(world, attribute=attribute)


def test_a_run_reports_the_guarantee_of_its_perturbation(run_tiny):
    result = run_tiny(*TARGETED, "perturb.budget=0.3")
    assert any("epsilon + ln m" in line for line in result.privacy)
    from fedrec.runs.folder import RunFolder

    assert RunFolder(result.folder).read_result().privacy == result.privacy
    assert load(result.folder / "experiment.toml").perturb.options["budget"] == 0.3


# The number of protected interactions, and their selection.


@pytest.mark.parametrize(("rows", "budget", "count"), [(10, 0.7, 3), (165, 0.3, 116), (1, 1.0, 0)])
def test_the_count_is_the_ceiling_of_the_decimal_fraction(rows, budget, count):
    """In floats (1 - .7) * 10 is above 3, and its ceiling 4."""
    assert targeted._protected_count(rows, budget) == count


def test_ties_are_broken_at_random():
    random = np.random.default_rng(0)
    taken = np.bincount(
        np.concatenate([targeted._most_stereotypical(np.zeros(5), 1, random) for _ in range(500)]),
        minlength=5,
    )
    assert taken.min() > 60 and taken.max() < 140  # 100 each; five standard deviations are 45


# Item-group inclination and stereotypicality by hand.


def test_two_groups_by_hand():
    """Group 0 is users 0 and 1, group 1 users 2, 3 and 4; user 5 has no group. Item 3 has no
    rows."""
    groups = np.array([0, 0, 1, 1, 1, -1])
    users = np.array([0, 0, 0, 1, 2, 3, 4, 4, 5, 5])
    items = np.array([0, 0, 1, 1, 0, 0, 2, 2, 2, 3])
    inside, outside = targeted._inclination(users, items, groups, num_groups=2, num_items=5)
    assert inside == pytest.approx(np.array([[1 / 2, 1, 0, 0, 0], [2 / 3, 0, 1 / 3, 0, 0]]))
    assert outside == pytest.approx(inside[::-1])
    score = targeted._stereotypicality(inside, outside)
    assert score[0] == pytest.approx([(1 / 2 - 2 / 3) / (2 / 3), 1, -1, 0, 0])
    assert score[1] == pytest.approx(-score[0])  # the sign I_a(u) of equation 1


def test_three_groups_are_each_compared_with_all_others():
    groups = np.array([0, 1, 2, 2])
    users, items = np.array([0, 2, 3, 1]), np.array([0, 0, 1, 1])
    inside, outside = targeted._inclination(users, items, groups, num_groups=3, num_items=2)
    assert inside == pytest.approx(np.array([[1, 0], [0, 1], [1 / 2, 1 / 2]]))
    assert outside == pytest.approx(np.array([[1 / 3, 2 / 3], [2 / 3, 1 / 3], [1 / 2, 1 / 2]]))
    assert targeted._stereotypicality(inside, outside)[0] == pytest.approx([2 / 3, -1])


# True epsilons by enumeration of all outcomes of the equations, against the formulas.

INF = math.inf
ODDS, SLOT = "true, log odds of a real interaction", "true, one slot"
ITEM, PROFILE = "true, profile, one item exchanged", "true, whole profile"


def config(epsilon, budget=0.0):
    return TargetedConfig(attribute="gender", epsilon=epsilon, budget=budget)


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


@pytest.mark.parametrize(
    ("epsilon", "values", "odds"), [(0.1, 1, 8.27), (0.1, 5, 9.88), (3.0, 5, 12.78)]
)
def test_figures_of_the_poster(epsilon, values, odds):
    """ML-1M: 165 interactions, 3706 items, with and without five rating values."""
    sizes = {"num_items": 3706, "own_items": 165, "rows": 165, "protected": 165}
    found = targeted._guarantee(config(epsilon), **sizes, num_values=values)
    assert found[ODDS] == pytest.approx(odds, abs=0.005)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_items=st.integers(2, 5),
    size=st.integers(1, 2),
    values=st.integers(1, 2),
    epsilon=st.floats(0.01, 5.0),
)
def test_the_formulas_are_the_enumerated_likelihood_ratios(num_items, size, values, epsilon):
    assume(num_items > size)
    assume(num_items * values <= 8)

    def outcomes(profile):
        return coin_flip_outcomes(profile, num_items, epsilon, values=values)

    counts = dict.fromkeys(("own_items", "rows", "protected"), size)
    found = targeted._guarantee(config(epsilon), num_items=num_items, num_values=values, **counts)
    if size == 1:
        assert found[SLOT] == found[ITEM] == found[PROFILE]
    odds = math.log((num_items - size) * values) + epsilon
    assert found[ODDS] == pytest.approx(odds) and found[SLOT] == (odds if values == 1 else INF)
    for differ, claimed in ((1, found[ITEM]), (size, found[PROFILE])):
        assert claimed == pytest.approx(enumerated(outcomes, num_items, size, differ, values))
