# SPDX-License-Identifier: Apache-2.0
"""Scores of canaries: positive where an observer would guess the sign +1. One per kind of observer.

- `final`: sees the last model only (with the first, which is public): the sum of all releases.
- `trace`: sees every model: log-likelihood ratio of the two signs, participation unknown (sampled
  Gaussian).
- `known`: sees every model and the cohorts: the sum over the rounds the canary took part in.
  Amplification by sampling does not bound this one; `PrivacyClaim.known_epsilon` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedrec.attacks.audit.claim import PrivacyClaim
from fedrec.attacks.audit.observations import Observations
from fedrec.privacy.accounting.gdp import gdp_parameter


@dataclass(frozen=True, eq=False)
class Scores:
    """The canaries' scores for one kind of observer.

    Attributes:
        name: `"final"`, `"trace"` or `"known"`.
        values: `float64 [k]`.
        scale: standard deviation of a score under the claimed mechanism, a function of the claim
            alone.
        upper: the epsilon that the claim allows this observer.
    """

    name: str
    values: np.ndarray
    scale: float
    upper: float


def all_scores(seen: Observations, claim: PrivacyClaim) -> list[Scores]:
    """The scores of every observer that the claim allows; without claimed noise only the first."""
    if claim.mixing is not None:
        return [known_scores(seen, claim)]
    found = [final_scores(seen, claim)]
    if claim.noise_std:
        found += [trace_scores(seen, claim), known_scores(seen, claim)]
    return found


def final_scores(seen: Observations, claim: PrivacyClaim) -> Scores:
    """`f_j = sum_t x_tj`."""
    q = claim.sampling_rate
    rounds = claim.rounds
    variance = rounds * (claim.noise_std**2 + q * (1 - q) * claim.signal**2)
    scale = math.sqrt(variance) or claim.signal
    return Scores("final", seen.released.sum(axis=0), scale, claim.epsilon)


def trace_scores(seen: Observations, claim: PrivacyClaim) -> Scores:
    """`l_j = sum_t log[(1 - q + q e^((x m - m^2/2) / s^2)) / (1 - q + q e^((-x m - m^2/2) /
    s^2))]`, m = S/M."""
    q = claim.sampling_rate
    m = claim.signal
    variance = claim.noise_std**2
    absent = math.log1p(-q) if q < 1 else -math.inf

    def log_density(sign: int) -> np.ndarray:
        return np.logaddexp(absent, math.log(q) + (sign * seen.released * m - m * m / 2) / variance)

    values = (log_density(1) - log_density(-1)).sum(axis=0)
    scale = 2 * q * m * math.sqrt(claim.rounds / variance)  # to first order in m / s
    return Scores("trace", values, scale, claim.epsilon)


def known_scores(seen: Observations, claim: PrivacyClaim) -> Scores:
    """`c_j = sum_(t: j takes part) x_tj`; of correlated noise, weighted by how far j moves what is
    observed. Where cohorts may be known, the claimed epsilon bounds it."""
    weights = seen.taking_part.astype(np.float64)
    values = (weights * seen.released).sum(axis=0)
    if claim.mixing is not None and claim.sampling_rate == 1:
        # noise of the claimed epsilon: its scale is no function of what was observed
        moved = gdp_parameter(claim.epsilon, claim.delta) * claim.noise_multiplier
        return Scores("known", values, claim.noise_std * moved, claim.epsilon)
    expected = claim.sampling_rate * claim.rounds
    most = float(np.square(weights).sum(axis=0).max(initial=0))
    return Scores("known", values, claim.noise_std * math.sqrt(expected), claim.known_epsilon(most))
