# SPDX-License-Identifier: Apache-2.0
"""How far a client moves C x, and how much noise B z the workload has."""

from __future__ import annotations

import numpy as np

from fedrec.privacy.accounting.sampling import Full, Sampling, Scheduled
from fedrec.privacy.factorisation.coefficients import is_decreasing, quotient


def schedule_of(sampling: Sampling) -> Scheduled | None:
    """The schedule of known cohorts; everybody in each round is one, too. None: there is none."""
    if isinstance(sampling, Full):
        return Scheduled(1.0)
    return sampling if isinstance(sampling, Scheduled) else None


def has_known_cost(column: np.ndarray, schedule: Scheduled) -> bool:
    """Whether `sensitivity` or `norms` of a column `[bands]` is exact for a schedule.

    Columns of C at least as far apart as C has bands have no row in common, so that they are
    orthogonal. Where they overlap, the coefficients must not increase, and cohorts must not be
    secret, because amplification is proven for separate rows only.
    """
    apart = schedule.separation >= len(column)
    return apart or (schedule.rate == 1 and is_decreasing(column))


def sensitivity(column: np.ndarray, rounds: int, schedule: Scheduled) -> float:
    """Largest norm by which a client moves C x, if it moves x by at most 1 in each of its rounds.

    It is that of a client of the first round that comes again as soon and as often as it may:
    shown by Choquette-Choo et al. 2023 (theorem 2) for bands that do not overlap, and by Kalinin
    and Lampert 2024 (theorem 2) for coefficients that do not increase.

    Args:
        column: C's first coefficients, `[bands]`.
        rounds: number of rounds T.
        schedule: what is known of a client's rounds, see `has_known_cost`.
    """
    moved = np.zeros(rounds)
    for first in _firsts(rounds, schedule):
        own = column[: rounds - first]
        moved[first : first + len(own)] += own
    return float(np.linalg.norm(moved))


def norms(column: np.ndarray, rounds: int, schedule: Scheduled) -> np.ndarray:
    """The norms of the columns of those rounds, `float64 [participations]`; the last are cut off by
    the end of the run. `schedule` as for separate bands."""
    left = np.minimum(rounds - _firsts(rounds, schedule), len(column))
    return np.sqrt(np.cumsum(np.square(column)))[left - 1]


def errors(column: np.ndarray, workload: np.ndarray) -> np.ndarray:
    """Variance of the noise on each row of the workload, `float64 [rounds]`, for z of variance
    1."""
    return np.cumsum(np.square(quotient(workload, column)))


def _firsts(rounds: int, schedule: Scheduled) -> np.ndarray:
    return np.arange(schedule.most(rounds)) * schedule.separation
