# SPDX-License-Identifier: Apache-2.0
"""Explanations: the bounds are the published ones, and the caveats are those of the plan."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.explain import attack_ceiling, lines, probability_factor, sentence
from fedrec.privacy.plan import Plan
from fedrec.privacy.question import report


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


def test_the_true_epsilon_is_one_number_where_the_bounds_agree():
    plan = Plan.of(
        PrivacyConfig.parse({"clip-norm": 1.0, "noise-multiplier": 3.0}), "full", {}, 500, 1
    )
    found = report(plan)
    agreeing, apart = (replace(found, attack=found.epsilon - gap) for gap in (1e-9, 0.1))
    assert any(line.startswith("The true epsilon is") for line in lines(agreeing, "replace-one"))
    assert any(f"between {apart.attack:.4g}" in line for line in lines(apart, "replace-one"))


def test_the_factor_between_probabilities():
    assert probability_factor(math.log(3)) == pytest.approx(3)
    assert probability_factor(1e4) == math.inf


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 5.0, 15.0])
def test_no_sentence_bounds_single_outcomes_by_delta(epsilon):
    """With Gaussian noise that is (epsilon, delta) exactly, a privacy loss above epsilon is more
    probable than delta; what is said of sets of outcomes holds."""
    delta = 1e-5

    def profile(mu):  # of N(mu, 1) against N(0, 1); Balle and Wang 2018
        high = norm.cdf(mu / 2 - epsilon / mu)
        return high - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)

    mu = brentq(lambda mu: profile(mu) - delta, 1e-3, 50)
    assert norm.sf(epsilon / mu - mu / 2) > 2 * delta  # the loss is N(mu^2 / 2, mu^2)
    for threshold in np.linspace(-5, 10, 31):
        assert norm.sf(threshold - mu) <= math.exp(epsilon) * norm.sf(threshold) + delta * (
            1 + 1e-6
        )
    text = said(noise_multiplier=3.0)
    assert "except with probability" not in text and "may change the odds" not in text
    assert "plus 1e-05" in text and "odds of a single outcome may change by more" in text


def test_without_charges_nothing_is_claimed():
    assert lines(Accountant().epsilon(1e-5), "replace-one") == [
        "No round was charged to the privacy ledger, so nothing is claimed."
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "server is trusted"),
        ({"placement": "distributed", "max_dropouts": 4}, "when 4 clients"),
        ({"placement": "local"}, "all 20 rounds"),
        ({"delta": 0.01}, "above 1/N"),
        ({}, "simulation, not a release"),
        ({}, "exchanged for another's"),
        ({}, "early stopping"),
        ({}, "drawn uniformly from all 500"),
        ({"sampler": "poisson", "adjacency": "add-remove"}, "drawn independently"),
        ({"sampler": "poisson", "adjacency": "add-remove"}, "differ by one client"),
        (
            {"sampler": "poisson", "adjacency": "add-remove"},
            "The number of clients, 500, is public all the same",
        ),
        ({"private_phases": ["main"]}, "item sequences are users' data"),
        ({"paper_noise_order": True}, "algorithm 2"),
        ({"backend": "paper"}, "comparison only"),
        ({"noise_multiplier": 0.0}, "epsilon is infinite"),
        ({"backend": "autodp"}, "Method: RDP curves of autodp"),
        ({}, "Method: privacy loss distribution"),
    ],
    ids=str,
)
def test_caveats_of_the_plan_are_reported(settings, expected):
    assert expected in said(**settings)


@pytest.mark.parametrize(
    ("settings", "unsaid"),
    [
        ({"mode": "secure"}, "simulation"),
        ({"delta": 1e-4}, "above 1/N"),
        ({"placement": "local"}, "server is trusted"),
        ({"clients": 50}, "Amplification"),
        ({}, "item sequences"),
        ({}, "comparison only"),
    ],
    ids=str,
)
def test_caveats_that_do_not_concern_the_plan_are_left_out(settings, unsaid):
    assert unsaid not in said(**settings)


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
    assert said.startswith(start) and f"right in {share} of cases" in said
    assert "for a user's taking part (add-remove)" in sentence(found, "add-remove")


def test_nothing_sounds_like_an_attack_that_was_run():
    text = said()
    assert "attack reaches" not in text and "an audit does" in text
