# SPDX-License-Identifier: Apache-2.0
"""Bounds on epsilon from audits, also of broken servers and correlated noise."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import toeplitz
from scipy.special import binom

from fedrec.attacks.audit import (
    Audited,
    _audit_run,
    _laplace_score,
    _lower_bound,
    _one_run_bound,
    _one_run_epsilon,
    audit,
    audit_one_rating,
)
from fedrec.attacks.canaries import Observations, PrivacyClaim
from fedrec.baselines.private.ratings import DpsgdPnbmConfig
from fedrec.privacy.accounting.rdp import gdp_delta, gdp_epsilon

# Epsilon of a Gaussian release.


def test_known_values():
    assert gdp_epsilon(0.0, 1e-5) == gdp_epsilon(-1.0, 1e-5) == 0.0
    assert gdp_epsilon(math.inf, 1e-5) == math.inf
    assert gdp_epsilon(0.1, 0.1) == 0.0  # delta alone covers it
    # total variation of N(mu, 1) and N(0, 1) is 2 Phi(mu/2) - 1
    assert gdp_delta(0.0, 1.7) == pytest.approx(2 * stats.norm.cdf(0.85) - 1)


# Two datasets that differ in one rating: the paper's algorithm leaks more than it states, a correct
# mechanism does not.


def settings(epsilon):
    return DpsgdPnbmConfig(
        epsilon=epsilon, iterations=1, start="constant", rescale=0.05, learning_rate=0.1, floor=10.0
    )


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "trials"), [(1.0, 150), (0.5, 300)])
def test_one_rating_of_a_user_with_200_shows_more_than_the_nominal_epsilon(epsilon, trials):
    bound = audit_one_rating(settings(epsilon), 200, trials)
    assert bound > 2 * epsilon


def test_a_mechanism_that_holds_is_not_accused():
    """Laplace noise in proportion to the whole L1 distance: the datasets can be distinguished, but
    not beyond epsilon."""
    random = np.random.default_rng(0)
    first, second = np.zeros(40), np.full(40, 0.1)
    scale = np.abs(first - second).sum() / 1.0
    called = [
        sum(
            _laplace_score(one + random.laplace(0, scale, 40), first, second, scale) > 0
            for _ in range(4000)
        )
        for one in (first, second)
    ]
    assert _lower_bound(*called, 4000) <= 1.0
    assert 0.75 < _lower_bound(2788, 1212, 4000) < 0.83  # ln(.697 / .303) is .833


@pytest.mark.parametrize("change", [{"epsilon": None}, {"iterations": 2}, {"start": "uniform"}])
def test_what_cannot_be_audited_is_refused(change):
    with pytest.raises(ValueError, match="one iteration"):
        audit_one_rating(settings(1.0).model_copy(update=change), 30, 2)


# The one-run bound against values of an independent implementation, and on randomised response,
# whose epsilon is known.

# (canaries, guesses, correct, delta): what jax_privacy's one-run auditor gives at significance .05
REFERENCE = {
    (1000, 600, 600, 1e-5): 5.2704,
    (1000, 100, 90, 1e-5): 1.6261,
    (1000, 1000, 700, 1e-5): 0.7318,
    (500, 50, 50, 1e-6): 2.7833,
    (2000, 400, 300, 1e-5): 0.9028,
}


@pytest.mark.parametrize("case", REFERENCE)
def test_reference_values(case):
    assert _one_run_epsilon(*case, significance=0.05) == pytest.approx(REFERENCE[case], abs=1e-4)


def test_without_delta_it_is_the_exact_limit_of_a_proportion():
    low = stats.beta.ppf(0.05, 80, 21)  # one-sided Clopper-Pearson for 80 right guesses of 100
    assert _one_run_epsilon(100, 100, 80, 0.0) == pytest.approx(math.log(low / (1 - low)), abs=1e-5)


def test_no_more_than_chance_is_no_bound():
    assert _one_run_epsilon(100, 100, 50, 1e-5) == _one_run_epsilon(100, 50, 0, 1e-5) == 0.0
    signs = np.repeat([-1, 1], 50)
    assert _one_run_bound(np.zeros(100), signs, 1e-5).epsilon == 0.0


def test_it_holds_for_randomised_response_and_is_not_far_below():
    epsilon, bounds = 1.5, []
    for seed in range(100):
        random = np.random.default_rng(seed)
        signs = random.choice([-1, 1], 500)
        honest = random.random(500) < math.exp(epsilon) / (1 + math.exp(epsilon))
        bounds.append(
            _one_run_bound(
                np.where(honest, signs, -signs) * random.uniform(1, 2, 500), signs, 0.0
            ).epsilon
        )
    assert np.mean(np.array(bounds) > epsilon) <= 0.05
    assert np.median(bounds) > 1.1


def test_only_the_most_extreme_canaries_are_guessed():
    random = np.random.default_rng(0)
    signs = random.choice([-1, 1], 1000)
    scores = random.normal(size=1000)
    loud = random.permutation(1000)[:100]
    scores[loud] = 9.0 * signs[loud]  # these guesses are certain, the others random
    found = _one_run_bound(scores, signs, 1e-5)
    assert (found.guesses, found.correct) == (100, 100) and found.epsilon > 2.5


# The audit on a simulated server, correct and with each known error.
#
# 1000 clients and 1000 canaries, 200 of them in each of 100 rounds, noise of z = 1 times the
# sensitivity 2 S / M. The privacy loss distribution of sampling without replacement gives epsilon
# <= 7.80 at delta = 1e-5 for that, computed independently. The server is plain numpy and shares no
# code with the audit.

CLIENTS, CANARIES, COHORT, ROUNDS, CLIP = 1000, 1000, 200, 100, 1.0
NOISE = 1.0 * 2 * CLIP / COHORT
CLAIM = PrivacyClaim(CLIP, COHORT, NOISE, COHORT / (CLIENTS + CANARIES), ROUNDS, 1e-5, 7.80)

BROKEN_NOISE = {"factor 2": NOISE / 2, "noise / sqrt(M)": NOISE / math.sqrt(COHORT)}


def server(variant: str, seed: int) -> Observations:
    random = np.random.default_rng(seed)
    signs = random.choice([-1, 1], CANARIES)
    examples = np.where(
        np.arange(CLIENTS + CANARIES) < CANARIES,
        100.0,
        random.lognormal(2.5, 0.5, CLIENTS + CANARIES),
    )
    std = BROKEN_NOISE.get(variant, NOISE)
    released, taking_part = np.empty((ROUNDS, CANARIES)), np.zeros((ROUNDS, CANARIES), bool)
    for number in range(ROUNDS):
        cohort = random.choice(CLIENTS + CANARIES, COHORT, replace=False)
        taking_part[number, cohort[cohort < CANARIES]] = True
        weight = np.full(CLIENTS + CANARIES, 1 / COHORT)
        if variant == "n_k-weighted":
            weight = examples / examples[cohort].sum()
        upload = signs * CLIP * (10 if variant == "no clip" else 1)
        noise = np.random.default_rng(
            1 if variant == "same seed" else random.integers(2**32)
        ).normal(0, std, CANARIES)
        released[number] = taking_part[number] * upload * weight[:CANARIES] + noise
    return Observations(released, taking_part, signs)


def of(found, observer):
    return next(score for score in found.scores if score.observer == observer)


def check(found, name):
    return next(check for check in found.checks if check.name == name)


@pytest.mark.slow
def test_a_right_server_never_fails_in_twenty_audits():
    found = audit([Audited(server("right", seed), CLAIM) for seed in range(20)])
    assert {run.verdict for run in found.runs} <= {"PASS", "WARN"}
    assert sum(run.verdict == "PASS" for run in found.runs) >= 18
    lower = max(
        score.lower for run in found.runs for score in run.scores if score.observer != "known"
    )
    assert lower < 4.35 < CLAIM.epsilon  # what the sum of a canary's releases can show at most


# Of each server the ranges of the one-run bound, the GDP bound and the estimate of the observer
# `final`, what epsilon alone may say, and the check of level 0 that fails; the attack's own epsilon
# on the right server is 4.35.
SERVERS = {
    "right": ((1.0, 2.2), (2.5, 3.6), (3.8, 5.0), {"PASS"}, set()),
    "factor 2": ((2.5, 3.6), (6.5, 8.8), (8.8, 10.3), {"WARN", "FAIL"}, {"noise-std"}),
    "noise / sqrt(M)": ((4.5, 5.3), (25, 30), (38, 50), {"FAIL"}, {"noise-std"}),
    "no clip": ((4.5, 5.3), (25, 30), (34, 44), {"FAIL"}, {"reach", "reach-of-one"}),
    "n_k-weighted": ((2.2, 3.3), (5.8, 7.7), (7.8, 9.0), {"WARN", "FAIL"}, {"reach"}),
    "same seed": ((0, 0.2), (0, 0.1), (0, 1.2), {"PASS"}, {"noise-correlation"}),
}


@pytest.mark.parametrize("variant", SERVERS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_broken_server_is_found(variant, seed):
    """One seed for all rounds hides the signs, but not from the correlation."""
    *ranges, verdicts, failed = SERVERS[variant]
    found = _audit_run(Audited(server(variant, seed), CLAIM), significance=0.05)
    final = of(found, "final")
    values = final.one_run.epsilon, final.gdp, final.estimate.epsilon
    for value, (low, high) in zip(values, ranges, strict=True):
        assert low <= value <= high
    assert found.epsilon_verdict in verdicts
    assert failed <= {check.name for check in found.checks if not check.passed}
    assert found.verdict == ("FAIL" if failed else "PASS")
    std = check(found, "noise-std")
    share = BROKEN_NOISE.get(variant, NOISE) / NOISE
    assert variant == "same seed" or std.measured / NOISE == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("epsilon", "verdict"), [(1.0, "FAIL"), (3.9, "WARN"), (7.8, "PASS")])
def test_a_right_server_with_a_wrong_claim(epsilon, verdict):
    claim = dataclasses.replace(CLAIM, epsilon=epsilon)
    (found,) = audit([Audited(server("right", 0), claim)]).runs
    assert found.verdict == found.epsilon_verdict == verdict
    assert all(check.passed for check in found.checks)
    words = {"FAIL": "lower bound", "WARN": "point estimate"}
    assert bool(found.reasons()) == (verdict != "PASS")
    assert all(words[verdict] in reason for reason in found.reasons())
    for score in found.scores:
        if score.verdict == "WARN":
            ends = f"(95 % interval {score.estimate.low:.3f} to {score.estimate.high:.3f})"
            assert ends in score.reasons()[0] and "repeat with" in score.reasons()[0]


def test_a_claim_of_nothing_is_never_refuted():
    silent = PrivacyClaim(CLIP, COHORT, 0.0, CLAIM.sampling_rate, ROUNDS, 1e-5, math.inf)
    found = audit([Audited(server("noise / sqrt(M)", 0), silent)])
    assert [score.observer for score in found.runs[0].scores] == ["final"]
    assert found.runs[0].epsilon_verdict == "PASS"


# The audit of correlated noise on a simulated server, correct and broken: it knows what a mechanism
# claims, and catches one that claims too much.
#
# 1000 canaries, each of which takes part every 8 rounds in 64, under noise of 5 bands. Server and
# sensitivity are plain numpy: the norm of a client's 8 columns.

APART, BANDS, T = 8, 5, 64
Z = 4.0
Z_NOISE = Z * 2 * CLIP / COHORT


def lower(bands, rounds=T):
    column = np.zeros(rounds)
    column[:bands] = np.abs(binom(-0.5, np.arange(bands)))
    return toeplitz(column, np.zeros(rounds))


def claimed(bands=BANDS):
    c = lower(bands)
    moved = math.sqrt(sum(np.square(c[:, first]).sum() for first in range(0, T, APART)))
    mixing = tuple(np.linalg.inv(c)[:, 0].tolist())
    epsilon = gdp_epsilon(moved / Z, 1e-5)
    return PrivacyClaim(CLIP, COHORT, Z_NOISE, 1.0, T, 1e-5, epsilon, mixing)


def server_of_correlated_noise(variant, seed):
    random = np.random.default_rng(seed)
    signs = random.choice([-1, 1], CANARIES)
    apart = 2 if variant == "separation" else APART
    turns = random.integers(apart, size=CANARIES)
    taking_part = np.arange(T)[:, None] % apart == turns
    white = random.normal(0, Z_NOISE / (2 if variant == "half the noise" else 1), (T, CANARIES))
    c = lower({"narrow band": 2, "not correlated": 1}.get(variant, BANDS))
    if variant == "state lost":  # the run is resumed after half of its rounds
        c[T // 2 :, : T // 2] = 0
    released = taking_part * signs * CLIP / COHORT + np.linalg.inv(c) @ white
    return Observations(released, taking_part, signs)


def found(variant, seed, claim=None):
    return audit([Audited(server_of_correlated_noise(variant, seed), claim or claimed())]).runs[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_right_server_does_not_fail(seed):
    run = found("right", seed)
    assert run.verdict in ("PASS", "WARN") and all(check.passed for check in run.checks)
    names = {check.name: check.measured for check in run.checks}
    assert names["noise-std"] == pytest.approx(Z_NOISE, rel=0.02)
    assert names["reach"] == pytest.approx(CLIP / COHORT, rel=0.15)


@pytest.mark.parametrize(
    ("variant", "check"),
    [
        ("half the noise", "noise-std"),
        ("not correlated", "noise-correlation"),
        ("narrow band", "noise-correlation"),
        ("state lost", "noise-correlation"),
    ],
)
def test_noise_that_is_not_what_is_claimed_fails(variant, check):
    run = found(variant, 0)
    failed = {one.name for one in run.checks if not one.passed}
    assert run.verdict == "FAIL" and check in failed


def test_a_wrong_separation_exceeds_the_claimed_epsilon():
    """Clients come four times as often as the schedule says; the noise itself is right."""
    run = found("separation", 0)
    assert run.verdict == "FAIL" and any("lower bound" in reason for reason in run.reasons())
    assert all(check.passed for check in run.checks if check.name.startswith("noise"))


def test_independent_noise_is_not_mistaken_for_correlated():
    """Without the claim of correlation, right correlated noise fails, as before."""
    claim = dataclasses.replace(claimed(), mixing=None)
    failed = {one.name for one in found("right", 0, claim).checks if not one.passed}
    assert "noise-correlation" in failed
