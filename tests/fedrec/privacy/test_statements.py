# SPDX-License-Identifier: Apache-2.0
"""Statements about an epsilon, adjacency, and the cost of private choices."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy.stats import geom, logser

from fedrec.errors import ExperimentError
from fedrec.neighbourhood import scaled
from fedrec.privacy.accounting.accountant import LAWS, Accountant, RandomTrials
from fedrec.privacy.accounting.rdp import INTEGER_ORDERS
from fedrec.privacy.clipping import Clip
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.privacy.statement import (
    amplified,
    attack_ceiling,
    lines,
    report,
    schedule_total,
    sentence,
)

# Explanations: the bounds are the published ones, and the caveats are those of the plan.


def said(sampler="fixed-size", clients=500, backend=None, **settings):
    settings = {key.replace("_", "-"): value for key, value in settings.items()}
    config = PrivacyConfig.parse({"clip-norm": 1.0, "noise-multiplier": 3.0, **settings})
    plan = Plan.of(config, sampler, {"cohort": 50}, clients, 20)
    return " ".join(lines(report(plan, backend=backend), config.adjacency))


@pytest.mark.parametrize(
    ("epsilon", "accuracy"), [(0, 0.5), (2, 0.881), (5, 0.9933), (15, 1.0), (math.inf, 1.0)]
)
def test_accuracy_of_membership_attacks(epsilon, accuracy):
    assert attack_ceiling(epsilon, 0.0) == pytest.approx(accuracy, abs=5e-4)
    assert attack_ceiling(epsilon, 1.0) == pytest.approx(1.0)
    assert attack_ceiling(epsilon, 1e-5) <= 1.0


def test_without_charges_nothing_is_claimed():
    assert lines(Accountant().epsilon(1e-5), "replace-one") == [
        "No round was charged to the privacy ledger: there is no epsilon to report."
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "server is trusted"),
        ({"placement": "distributed", "max_dropouts": 4}, "if 4 clients"),
        ({"placement": "local"}, "all 20 rounds"),
        ({"delta": 0.01}, "above 1/N"),
        ({}, "simulation, not a release"),
        ({}, "drawn uniformly from all 500"),
        ({"sampler": "poisson", "adjacency": "add-remove"}, "drawn independently"),
        (
            {"sampler": "poisson", "adjacency": "add-remove"},
            "Nevertheless the number of clients, 500, is public",
        ),
        ({"backend": "paper"}, "comparison only"),
        ({"noise_multiplier": 0.0}, "epsilon is infinite"),
        ({"sampler": "full", "delta": 1e-5}, "between 6.999, what the noise gives away"),
    ],
    ids=str,
)
def test_caveats_of_the_plan_are_reported(settings, expected):
    assert expected in said(**settings)


@pytest.mark.parametrize(
    ("epsilon", "word", "share"),
    [
        (0.5, "strong", "at most 62.2%"),
        (5.0, "weak", "at most 99.3%"),
        (7.0, "weak", "at most 99.9%"),
        (9.0, "weak", "up to practically all"),
        (20.0, "very weak", "up to practically all"),
    ],
)
def test_the_first_sentence_says_the_whole_guarantee(epsilon, word, share):
    """Unit, epsilon, delta, adjacency and how strong it is; no bound of 100.0%."""
    found = replace(Accountant().epsilon(1e-5), epsilon=epsilon)
    said = sentence(found, "replace-one")
    start = f"epsilon {epsilon:g} at delta 1e-05 for all data of a user (replace-one) is {word}:"
    assert said.startswith(start) and f"is right {share} of the time" in said
    assert "for a user's taking part (add-remove)" in sentence(found, "add-remove")


# Exact totals of nominal schedules, against the formula in exact arithmetic and a mechanism by
# hand.


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("rate", [0.01, 0.2, 1.0])
def test_amplification_is_that_of_randomised_response(epsilon, rate):
    """Worst case: the row is in the sample with probability `rate`, and answers e^eps / (1 + e^eps)
    : 1 / (1 + e^eps)."""
    p, q = math.exp(epsilon) / (1 + math.exp(epsilon)), 1 / (1 + math.exp(epsilon))
    assert amplified(epsilon, rate) >= math.log(rate * p / q + 1 - rate) - 1e-12
    assert amplified(epsilon, rate) == pytest.approx(math.log1p(rate * math.expm1(epsilon)))


def test_totals():
    """K ln(1 + g (exp(e / (K g)) - 1)) for several schedules: 1 at K = 10, g = .01 is 54, and so
    on."""
    expected = {
        (1, 10, 0.01): 54,
        (1, 20, 0.05): 1.65,
        (5, 20, 0.01): 408,
        (20, 10, 0.2): 84,
        (0.1, 10, 0.05): 0.110,
    }
    for (nominal, steps, rate), total in expected.items():
        assert schedule_total(nominal, steps, rate) == pytest.approx(total, rel=0.01)
    assert schedule_total(3.0, 7, 1.0) == pytest.approx(3.0)
    assert math.isfinite(schedule_total(20.0, 1, 1e-4))
    assert amplified(1e6, 0.5) == pytest.approx(1e6 - math.log(2))


SIZE = 12


def counts(random):
    """Adversarial non-negative vectors: single items, disjoint sets, all items, no items,
    failures."""
    halves = np.repeat([9.0, 0.0], SIZE // 2)
    yield from (
        1e20 * np.eye(SIZE)[0],
        np.eye(SIZE)[1],
        halves,
        9 - halves,
        np.ones(SIZE),
        np.zeros(SIZE),
    )
    yield from (np.full(SIZE, math.inf), np.full(SIZE, math.nan))
    yield from np.abs(random.standard_normal((10, SIZE))) * 10
    yield from (random.random((10, SIZE)) < 0.3).astype(float)


def gram_matrices(random):
    """Positive semi-definite matrices of orthogonal, equal and random vectors, and of several of
    them."""
    for vector in (
        np.eye(SIZE)[0] * 1e3,
        np.eye(SIZE)[1] * 1e3,
        np.eye(SIZE)[0] - np.eye(SIZE)[1],
        np.ones(SIZE),
    ):
        yield np.outer(vector, vector)
    for width in (1, 1, 2, SIZE):
        factors = random.standard_normal((SIZE, width)) * 10
        yield factors @ factors.T
    yield from (np.eye(SIZE), np.zeros((SIZE, SIZE)))


def profiles(random):
    """Ratings 1 to 5 of some items: opposite ratings of the same items, disjoint items, random
    ones, ratings outside the scale."""
    whole = [
        np.where(np.arange(SIZE) < SIZE // 2, low, high)
        for low in (0, 1, 5)
        for high in (0, 1, 5, 9)
    ]
    yield from whole
    yield from (random.integers(0, 6, SIZE) for _ in range(20))


def ratings(random):
    """Contributions to item means: each rating mapped to [-1, 1], and an indicator."""
    for own in profiles(random):
        yield np.stack([scaled(own, (1.0, 5.0)), np.ones(SIZE)]) * (own > 0)


def largest_move(kind, order=2):
    clip = Clip(3.0, order)
    clipped = [clip({"x": one})["x"].ravel() for one in kind(np.random.default_rng(4))]
    return max(np.linalg.norm(one - other, ord=order) for one in clipped for other in clipped)


@pytest.mark.parametrize(
    ("kind", "order", "contributions", "bound"),
    [
        *((kind, 2, "non-negative", 3 * math.sqrt(2)) for kind in (counts, gram_matrices, ratings)),
        (counts, 1, "non-negative", 6.0),  # in L1 nothing is gained
    ],
)
def test_an_exchange_moves_the_sum_by_the_sensitivity_and_no_more(
    kind, order, contributions, bound
):
    assert Clip(3.0, order, contributions).sensitivity("replace-one") == pytest.approx(bound)
    assert largest_move(kind, order) <= bound * (1 + 1e-12)
    assert largest_move(kind, order) == pytest.approx(bound, rel=1e-5)  # nothing smaller would do


def test_a_plan_needs_less_noise_for_the_same_event():
    config = PrivacyConfig(clip_norm=3.0, epsilon=2.0, delta=1e-5)
    signed, counted = (
        Plan.of(config, "full", {}, 100, 1, contributions=kind)
        for kind in ("signed", "non-negative")
    )
    assert counted.noise_multiplier == pytest.approx(signed.noise_multiplier)
    assert counted.noise_std == pytest.approx(signed.noise_std / math.sqrt(2))
    assert counted.sensitivity * counted.noise_multiplier == pytest.approx(counted.noise_std)


# The cost of the best of a random number of trials, against dp-accounting.

SHAPES = {"geometric": 1.0, "logarithmic": 0.0}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("mean", "z"), [(2.0, 3.0), (20.0, 1.5), (300.0, 8.0)])
def test_its_curve_and_epsilon_are_those_of_dp_accounting(law, mean, z):
    accountant = RdpAccountant(INTEGER_ORDERS.tolist())
    trial = dp_event.GaussianDpEvent(z)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, mean, SHAPES[law]))
    found = RandomTrials(law, mean).epsilon(INTEGER_ORDERS / (2 * z * z), 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("law", LAWS)
def test_the_number_of_trials_has_its_distribution(law):
    trials = RandomTrials(law, 7.0)
    random = np.random.default_rng(0)
    drawn = np.array([trials.draw(random) for _ in range(20_000)])
    exact = {"geometric": geom(1 / 7), "logarithmic": logser(1 - trials.gamma)}
    assert exact[law].mean() == pytest.approx(7.0, rel=1e-6)
    for count in (0, 1, 2, 5, 10):
        assert np.mean(drawn <= count) == pytest.approx(exact[law].cdf(count), abs=0.02)


def test_a_number_of_trials_without_a_bound_is_refused():
    with pytest.raises(ExperimentError, match="distribution for the number of trials"):
        RandomTrials("geometric", 0.5)
    with pytest.raises(ExperimentError, match="distribution for the number of trials"):
        RandomTrials("binomial", 5)  # type: ignore[arg-type]
