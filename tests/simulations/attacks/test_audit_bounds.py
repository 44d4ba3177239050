# SPDX-License-Identifier: Apache-2.0
"""Bounds on epsilon from audits, also of broken servers and correlated noise."""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import toeplitz
from scipy.special import binom

from fedrec.baselines.private.ratings import DpsgdPnbmConfig
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.rdp import gdp_delta, gdp_epsilon
from fedrec.privacy.canaries import (
    CanaryPlan,
    Directions,
    Observations,
    PrivacyClaim,
    _final_scores,
    _known_scores,
    _trace_scores,
)
from simulations.attacks.bounds import (
    CUTS,
    Audited,
    _all_checks,
    _audit_run,
    _differences,
    _estimate_epsilon,
    _gdp_bound,
    _laplace_score,
    _lower_bound,
    _one_run_bound,
    _one_run_epsilon,
    audit,
    audit_one_rating,
)

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
SERVER_CLAIM = PrivacyClaim(CLIP, COHORT, NOISE, COHORT / (CLIENTS + CANARIES), ROUNDS, 1e-5, 7.80)

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


@pytest.mark.slow
def test_a_right_server_never_fails_in_twenty_audits():
    found = audit([Audited(server("right", seed), SERVER_CLAIM) for seed in range(20)])
    assert {run.verdict for run in found.runs} <= {"PASS", "WARN"}
    assert sum(run.verdict == "PASS" for run in found.runs) >= 18
    lower = max(
        score.lower for run in found.runs for score in run.scores if score.observer != "known"
    )
    assert (
        lower < 4.35 < SERVER_CLAIM.epsilon
    )  # what the sum of a canary's releases can show at most


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
    found = _audit_run(Audited(server(variant, seed), SERVER_CLAIM), significance=0.05)
    final = of(found, "final")
    values = final.one_run.epsilon, final.gdp, final.estimate.epsilon
    for value, (low, high) in zip(values, ranges, strict=True):
        assert low <= value <= high
    assert found.epsilon_verdict in verdicts
    assert failed <= {check.name for check in found.checks if not check.passed}
    assert found.verdict == ("FAIL" if failed else "PASS")
    std = next(check for check in found.checks if check.name == "noise-std")
    share = BROKEN_NOISE.get(variant, NOISE) / NOISE
    assert variant == "same seed" or std.measured / NOISE == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("epsilon", "verdict"), [(1.0, "FAIL"), (3.9, "WARN"), (7.8, "PASS")])
def test_a_right_server_with_a_wrong_claim(epsilon, verdict):
    claim = dataclasses.replace(SERVER_CLAIM, epsilon=epsilon)
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
    silent = PrivacyClaim(CLIP, COHORT, 0.0, SERVER_CLAIM.sampling_rate, ROUNDS, 1e-5, math.inf)
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


# Parts of an audit against simple computations: canaries, scores, bounds, estimate, checks.

CLAIM = PrivacyClaim(
    clip=2.0,
    denominator=10.0,
    noise_std=0.3,
    sampling_rate=0.25,
    rounds=40,
    delta=1e-5,
    epsilon=5.0,
)


def seen(canaries=300, noise=0.3, seed=0, reach=0.2):
    """A run that satisfies the claim, unless changed."""
    random = np.random.default_rng(seed)
    signs = random.choice([-1, 1], canaries)
    taking_part = random.random((40, canaries)) < 0.25
    return Observations(
        taking_part * signs * reach + random.normal(0, noise, taking_part.shape), taking_part, signs
    )


SHAPES = {"item.id": (26, 5), "layer": (12, 3), "bias": (8,)}
ROOM = {"item.id": 6, "layer": 3, "bias": 2}


def uploads(own, plan, shapes):
    """What each canary uploads, flat over all parameters, `float64 [k, n]`."""
    starts = dict(zip(shapes, np.cumsum([0, *map(math.prod, shapes.values())]), strict=False))
    found = np.zeros((plan.count, sum(map(math.prod, shapes.values()))))
    for place, row in enumerate(found):
        for name, (places, values) in own.upload(plan.first + place).items():
            row[starts[name] + places] += values
    return found


def means(flat, shapes):
    """Flat values as parameters."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(flat, ends[:-1])
    return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


@pytest.mark.parametrize("patterns", [("item.id",), ("*",)])
def test_canaries_are_orthonormal_rows_that_nothing_depends_on(patterns):
    plan = CanaryPlan(first=50, count=6, magnitude=3.0, seed=1, parameters=patterns)
    own = Directions(plan, ROOM, SHAPES)
    flat = uploads(own, plan, SHAPES)
    assert flat @ flat.T == pytest.approx(9.0 * np.eye(6))
    for name, part in means(np.abs(flat).sum(axis=0), SHAPES).items():
        assert not part[: len(part) - ROOM[name]].any()
        assert part.any() == (name == "item.id" or patterns == ("*",))
    for place, row in enumerate(flat):
        found = own.project(means(row, SHAPES))
        assert found == pytest.approx(3.0 * plan.signs()[place] * np.eye(6)[place])
    assert set(own.groups) == {name for name in ROOM if name == "item.id" or patterns == ("*",)}


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [("rows", {"item.bias": (40, 1), "w": (3, 1)}), ("products", {"item.weights": (9, 9)})],
)
def test_canaries_without_signs_are_as_far_apart_as_two_clients_can_be(kind, shapes):
    """Clipped to norm S, they are sqrt(2) S apart, half of it on either side of zero."""
    plan = CanaryPlan(first=5, count=8, magnitude=1.0, seed=2, kind=kind)
    own = Directions(plan, {}, shapes)
    flat = uploads(own, plan, shapes)
    assert np.linalg.norm(flat, axis=1) == pytest.approx(1.0)
    if kind == "products":
        tables = [means(row, shapes)["item.weights"] for row in flat]
        assert all(np.linalg.eigvalsh(table).min() > -1e-12 for table in tables)
    else:
        assert (flat >= 0).all()
    for place, row in enumerate(flat):
        found = own.project(means(row, shapes))
        assert found[place] == pytest.approx(plan.signs()[place] / math.sqrt(2))
        assert own.quiet(means(row, shapes)) == pytest.approx(0.0, abs=1e-12)
    noise = np.random.default_rng(0).normal(size=(4000, flat.shape[1]))
    quiet = np.array([own.quiet(means(row, shapes)) for row in noise])
    assert quiet.shape[1] == (8 if kind == "rows" else 36)
    assert np.cov(quiet.T) == pytest.approx(np.eye(quiet.shape[1]), abs=0.1)


def test_signs_are_fair_secret_and_repeatable():
    signs = CanaryPlan(first=0, count=4000, magnitude=1.0, seed=1).signs()
    assert set(signs) == {-1, 1} and abs(signs.mean()) < 0.06
    assert np.array_equal(signs, CanaryPlan(first=9, count=4000, magnitude=2.0, seed=1).signs())
    assert (
        abs((signs * CanaryPlan(first=0, count=4000, magnitude=1.0, seed=2).signs()).mean()) < 0.06
    )


@pytest.mark.parametrize(
    ("kind", "room", "shapes"),
    [
        ("signed", {}, {"w": (30,)}),
        ("signed", {"w": 3}, {"w": (30,)}),
        ("rows", {}, {"item.bias": (7, 1), "w": (30, 2)}),
        ("products", {}, {"item.weights": (3, 3)}),
    ],
)
def test_a_model_without_room_for_canaries_is_refused(kind, room, shapes):
    with pytest.raises(ExperimentError, match="no room for canaries"):
        Directions(CanaryPlan(first=0, count=4, magnitude=1.0, kind=kind), room, shapes)


def test_final_and_known_scores_are_sums():
    run = seen(canaries=20)
    assert _final_scores(run, CLAIM).values == pytest.approx(
        sum(run.released[t] for t in range(40))
    )
    known = [sum(run.released[t, j] for t in range(40) if run.taking_part[t, j]) for j in range(20)]
    assert _known_scores(run, CLAIM).values == pytest.approx(known)


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_trace_scores_are_log_likelihood_ratios_of_the_mixtures(rate):
    run = seen(canaries=20)
    claim = replace(CLAIM, sampling_rate=rate)

    def density(x, sign):
        return (1 - rate) * stats.norm.pdf(x, 0, 0.3) + rate * stats.norm.pdf(x, sign * 0.2, 0.3)

    expected = np.log(density(run.released, 1) / density(run.released, -1)).sum(axis=0)
    assert _trace_scores(run, claim).values == pytest.approx(expected)


def test_scales_are_the_scores_standard_deviations_under_the_claim():
    run = seen(canaries=4000)
    signed = [score(run, CLAIM) for score in (_final_scores, _known_scores, _trace_scores)]
    for score in signed:
        assert (score.values * run.signs).std() == pytest.approx(score.scale, rel=0.25)
    final = signed[0]
    assert (final.values * run.signs).std() == pytest.approx(final.scale, rel=0.05)


def test_the_claim_in_other_words():
    assert CLAIM.signal == pytest.approx(0.2) and CLAIM.noise_multiplier == pytest.approx(0.75)
    # n releases of sensitivity 2 S / M are one Gaussian release with mu = sqrt(n) 2 S / (M sigma)
    assert CLAIM.known_epsilon(9) == pytest.approx(gdp_epsilon(3 * 0.4 / 0.3, 1e-5))
    assert replace(CLAIM, noise_std=0.0).known_epsilon(1) == math.inf


def test_gdp_bound_is_that_of_the_exact_limits_at_its_best_cut():
    run = seen(canaries=400)
    score = _final_scores(run, CLAIM)
    tail, best = 0.05 / (2 * len(CUTS)), 0.0
    for cut in CUTS:
        minus, plus = score.values[run.signs < 0], score.values[run.signs > 0]
        alarms, misses = (minus > cut * score.scale).sum(), (plus <= cut * score.scale).sum()
        rates = [
            stats.beta.ppf(1 - tail, n + 1, m - n)
            for n, m in ((alarms, len(minus)), (misses, len(plus)))
        ]
        best = max(best, -stats.norm.ppf(rates[0]) - stats.norm.ppf(rates[1]))
    found = _gdp_bound(score.values, run.signs, score.scale, 1e-5)
    assert found == pytest.approx(gdp_epsilon(float(best), 1e-5))


def test_gdp_bound_has_its_coverage():
    above = 0
    for seed in range(300):
        random = np.random.default_rng(seed)
        signs = random.choice([-1, 1], 300)
        above += _gdp_bound(random.normal(size=300) + 0.5 * signs, signs, 1.0, 1e-5) > gdp_epsilon(
            1.0, 1e-5
        )
    assert above <= 15


@pytest.mark.slow
def test_the_estimate_is_right_on_average_and_its_interval_has_its_coverage():
    truth, found = gdp_epsilon(1.0, 1e-3), []
    for seed in range(60):
        random = np.random.default_rng(seed)
        signs = np.repeat([-1, 1], 500)
        found.append(_estimate_epsilon(random.normal(size=1000) + 0.5 * signs, signs, 1e-3))
    assert np.mean([estimate.epsilon for estimate in found]) == pytest.approx(truth, rel=0.03)
    assert np.mean([estimate.low <= truth <= estimate.high for estimate in found]) >= 0.85


def test_without_noise_the_estimate_is_infinite():
    estimate = _estimate_epsilon(np.repeat([-1.0, 1.0], 10), np.repeat([-1, 1], 10), 1e-5)
    assert estimate.epsilon == estimate.low == math.inf


def check(run, name, significance=0.001, claim=CLAIM):
    """The check of that name; None if it does not apply."""
    return next((one for one in _all_checks(run, claim, significance) if one.name == name), None)


def test_checks_pass_correct_claims_with_about_their_probability():
    runs = [list(_all_checks(seen(canaries=60, seed=seed), CLAIM, 0.05)) for seed in range(200)]
    for checks in zip(*runs, strict=True):
        assert sum(not one.passed for one in checks) <= 20, checks[0].name


def test_a_little_less_noise_is_found_and_more_noise_passes():
    assert not check(seen(canaries=1000, noise=0.3 * 0.98), "noise-std").passed
    assert check(seen(canaries=1000, noise=0.6), "noise-std").passed


def everybody(noise=0.3, seed=0, reach=0.2, canaries=500, rounds=3):
    """A run with every canary in every round."""
    random = np.random.default_rng(seed)
    signs = random.choice([-1, 1], canaries)
    released = signs * reach + random.normal(0, noise, (rounds, canaries))
    return Observations(released, np.ones(released.shape, dtype=bool), signs)


def test_noise_is_checked_where_no_canary_is_ever_absent():
    run = everybody(canaries=20)
    centred = run.released * run.signs - (run.released * run.signs).mean(axis=1, keepdims=True)
    left = _differences(run)
    assert left.released.shape == (3, 19) and not left.taking_part.any()
    # n - 1 degrees of freedom
    assert left.released @ left.released.T == pytest.approx(centred @ centred.T)
    assert _differences(everybody(noise=0.0)).released == pytest.approx(0.0, abs=1e-12)
    for reach in (0.2, 7.0):
        assert not check(everybody(noise=0.3 * 0.9, reach=reach), "noise-std").passed
    repeated = everybody(reach=0.0)
    repeated.released[2] = repeated.released[0]
    assert [c.name for c in _all_checks(repeated, CLAIM, 0.001) if not c.passed] == [
        "noise-correlation"
    ]


def test_a_canary_that_reaches_too_far_is_found():
    for reach, name in ((0.25, "reach"), (0.7, "reach-of-one")):
        far = check(seen(reach=reach), name)
        assert not far.passed and far.claimed == pytest.approx(0.2)
        assert name == "reach-of-one" or far.measured == pytest.approx(0.25, abs=0.03)
    assert check(seen(reach=0.19), "reach").passed


def shared(reach=0.2, seed=0, canaries=200, others=0.5):
    """Canaries in directions in which others, who do not know the signs, move the mean further."""
    random = np.random.default_rng(seed)
    signs = random.choice([-1, 1], canaries)
    released = signs * reach + random.normal(others, others, (2, canaries))
    return Observations(
        released, np.ones(released.shape, dtype=bool), signs, np.zeros((2, 3)), shared=True
    )


def test_reach_is_tested_where_others_move_the_mean_too():
    far = check(shared(reach=2.0), "reach")
    assert not far.passed and far.measured == pytest.approx(2, abs=0.2)
    assert sum(not check(shared(seed=n), "reach", 0.05).passed for n in range(200)) <= 10
    assert check(shared(canaries=4), "reach") is None
    names = [one.name for one in _all_checks(shared(), CLAIM, 0.001)]
    assert names == ["reach", "noise-std", "noise-correlation"]


def test_noise_is_checked_where_no_client_ever_moves_the_mean():
    run, random = shared(), np.random.default_rng(0)
    for std, right in ((0.3, True), (0.15, False)):
        own = replace(run, quiet=random.normal(0, std, (2, 100)))
        noise = check(own, "noise-std")
        assert noise.passed == right and noise.measured == pytest.approx(std, rel=0.15)


def test_canaries_of_one_parameter_that_reach_too_far_are_found():
    run = seen(canaries=300)
    parameters = np.repeat(["a", "b", "c"], 100)
    run.released[:, parameters == "b"] += (run.taking_part * run.signs)[:, parameters == "b"] * 0.3
    grouped = replace(run, groups=parameters)
    assert [check(grouped, f"reach-of-{name}").passed for name in "abc"] == [True, False, True]


def test_one_heavy_canary_among_many_is_found():
    run = seen()
    run.released[:, 7] += run.taking_part[:, 7] * run.signs[7] * 1.0
    assert not check(run, "reach-of-one").passed and check(run, "reach").passed


def test_without_noise_the_reach_is_exact():
    claim = replace(CLAIM, noise_std=0.0)
    for name in ("reach", "reach-of-one"):
        assert check(seen(noise=0.0), name, 0.05, claim).passed
        assert not check(seen(noise=0.0, reach=0.201), name, 0.05, claim).passed


def test_two_rounds_with_the_same_noise_are_found():
    run = seen()
    quiet = ~run.taking_part
    both = quiet[3] & quiet[30]
    run.released[30, both] = run.released[3, both]
    shared_noise = check(run, "noise-correlation")
    assert not shared_noise.passed and shared_noise.measured == pytest.approx(1.0)


def test_releases_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite"):
        Observations(np.full((2, 2), np.nan), np.zeros((2, 2), bool), np.array([1, -1]))
