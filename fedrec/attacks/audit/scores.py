# SPDX-License-Identifier: Apache-2.0
"""Scores of canaries: positive where an observer would guess the sign +1. One per kind of observer.

- `final`: sees the last model only (with the first, which is public): the sum of all releases.
- `trace`: sees every model: log-likelihood ratio of the two signs, participation unknown (sampled
  Gaussian).
- `known`: sees every model and the cohorts: the sum over the rounds the canary took part in.
  Amplification by sampling does not bound this one; `Mechanism.known_epsilon` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedrec.attacks.audit.mechanism import Mechanism
from fedrec.attacks.audit.observations import Observations


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


def all_scores(seen: Observations, mechanism: Mechanism) -> list[Scores]:
    """The scores of every observer that the claim allows; without claimed noise only the first."""
    found = [final_scores(seen, mechanism)]
    if mechanism.noise_std:
        found += [trace_scores(seen, mechanism), known_scores(seen, mechanism)]
    return found


def final_scores(seen: Observations, mechanism: Mechanism) -> Scores:
    """`f_j = sum_t x_tj`."""
    q = mechanism.sampling_rate
    rounds = mechanism.rounds
    variance = rounds * (mechanism.noise_std**2 + q * (1 - q) * mechanism.signal**2)
    scale = math.sqrt(variance) or mechanism.signal
    return Scores("final", seen.released.sum(axis=0), scale, mechanism.epsilon)


def trace_scores(seen: Observations, mechanism: Mechanism) -> Scores:
    """`l_j = sum_t log[(1 - q + q e^((x m - m^2/2) / s^2)) / (1 - q + q e^((-x m - m^2/2) /
    s^2))]`, m = S/M."""
    q = mechanism.sampling_rate
    m = mechanism.signal
    variance = mechanism.noise_std**2
    absent = math.log1p(-q) if q < 1 else -math.inf

    def log_density(sign: int) -> np.ndarray:
        return np.logaddexp(absent, math.log(q) + (sign * seen.released * m - m * m / 2) / variance)

    values = (log_density(1) - log_density(-1)).sum(axis=0)
    scale = 2 * q * m * math.sqrt(mechanism.rounds / variance)  # to first order in m / s
    return Scores("trace", values, scale, mechanism.epsilon)


def known_scores(seen: Observations, mechanism: Mechanism) -> Scores:
    """`c_j = sum_(t: j takes part) x_tj`."""
    values = np.where(seen.taking_part, seen.released, 0.0).sum(axis=0)
    expected = mechanism.sampling_rate * mechanism.rounds
    most = int(seen.taking_part.sum(axis=0).max(initial=0))
    return Scores(
        "known", values, mechanism.noise_std * math.sqrt(expected), mechanism.known_epsilon(most)
    )
