# SPDX-License-Identifier: Apache-2.0
"""The audit of correlated noise on a simulated server, correct and broken: it knows what a
mechanism claims, and catches one that claims too much.

1000 canaries, each of which takes part every 8 rounds in 64, under noise of 5 bands. Server and
sensitivity are plain numpy: the norm of a client's 8 columns.
"""

import dataclasses
import math

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.special import binom

from fedrec.attacks.audit.claim import PrivacyClaim
from fedrec.attacks.audit.observations import Observations
from fedrec.attacks.audit.verdict import Audited, audit
from fedrec.privacy.accounting.gdp import gdp_epsilon

CANARIES, ROUNDS, APART, BANDS, CLIP, COHORT = 1000, 64, 8, 5, 1.0, 200
Z = 4.0
NOISE = Z * 2 * CLIP / COHORT


def lower(bands, rounds=ROUNDS):
    column = np.zeros(rounds)
    column[:bands] = np.abs(binom(-0.5, np.arange(bands)))
    return toeplitz(column, np.zeros(rounds))


def claimed(bands=BANDS):
    c = lower(bands)
    moved = math.sqrt(sum(np.square(c[:, first]).sum() for first in range(0, ROUNDS, APART)))
    mixing = tuple(np.linalg.inv(c)[:, 0].tolist())
    epsilon = gdp_epsilon(moved / Z, 1e-5)
    return PrivacyClaim(CLIP, COHORT, NOISE, 1.0, ROUNDS, 1e-5, epsilon, mixing)


def server(variant, seed):
    random = np.random.default_rng(seed)
    signs = random.choice([-1, 1], CANARIES)
    apart = 2 if variant == "separation" else APART
    turns = random.integers(apart, size=CANARIES)
    taking_part = np.arange(ROUNDS)[:, None] % apart == turns
    white = random.normal(0, NOISE / (2 if variant == "half the noise" else 1), (ROUNDS, CANARIES))
    c = lower({"narrow band": 2, "not correlated": 1}.get(variant, BANDS))
    if variant == "state lost":  # the run is resumed after half of its rounds
        c[ROUNDS // 2 :, : ROUNDS // 2] = 0
    released = taking_part * signs * CLIP / COHORT + np.linalg.inv(c) @ white
    return Observations(released, taking_part, signs)


def found(variant, seed, claim=None):
    return audit([Audited(server(variant, seed), claim or claimed())]).runs[0]


@pytest.mark.parametrize("seed", range(5))
def test_a_right_server_does_not_fail(seed):
    run = found("right", seed)
    assert run.verdict in ("PASS", "WARN") and all(check.passed for check in run.checks)
    names = {check.name: check.measured for check in run.checks}
    assert names["noise-std"] == pytest.approx(NOISE, rel=0.02)
    assert names["reach"] == pytest.approx(CLIP / COHORT, rel=0.15)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("variant", "check"),
    [
        ("half the noise", "noise-std"),
        ("not correlated", "noise-correlation"),
        ("narrow band", "noise-correlation"),
        ("state lost", "noise-correlation"),
    ],
)
def test_noise_that_is_not_what_is_claimed_fails(variant, check, seed):
    run = found(variant, seed)
    failed = {one.name for one in run.checks if not one.passed}
    assert run.verdict == "FAIL" and check in failed


@pytest.mark.parametrize("seed", range(2))
def test_a_wrong_separation_exceeds_the_claimed_epsilon(seed):
    """Clients come four times as often as the schedule says; the noise itself is right."""
    run = found("separation", seed)
    assert run.verdict == "FAIL" and any("lower bound" in reason for reason in run.reasons())
    assert all(check.passed for check in run.checks if check.name.startswith("noise"))


def test_independent_noise_is_not_mistaken_for_correlated():
    """Without the claim of correlation, right correlated noise fails, as before."""
    claim = dataclasses.replace(claimed(), mixing=None)
    failed = {one.name for one in found("right", 0, claim).checks if not one.passed}
    assert "noise-correlation" in failed


def test_one_claimed_band_is_independent_noise():
    claim = claimed(1)
    assert found("not correlated", 0, claim).verdict in ("PASS", "WARN")
    whitened = server("not correlated", 0).whitened(claim.mixing)
    assert np.array_equal(whitened.released, server("not correlated", 0).released)
