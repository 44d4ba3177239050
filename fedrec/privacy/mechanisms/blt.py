# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise of a buffered linear Toeplitz matrix, and a lower bound on the cost of any
mechanism.

What rounds cost at least, whatever their mechanism states: a mechanism may bring its own
accountant, and a claim below this is refused before the first round.

A client moves the sums of its rounds by x, in units of the sensitivity; their noise is z B w with
independent w of standard deviation 1 (`Mechanism.mixing`). The best weighted sum of the rounds then
moves by r = |B^-1 x| / z standard deviations, and two distributions with means r apart and standard
deviation 1 have a total variation distance of at least r^2 / (4 + r^2): with c between the means
and f = |p - q|, Cauchy and Schwarz give r^2 <= (integral of f) (integral of (x - c)^2 f), which is
at most 2 TV (2 + r^2 / 2). Sampling at a rate q leaves q times the distance of one round. That
distance is a delta at epsilon 0, for noise of any distribution.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.linalg import solve_triangular, toeplitz

from fedrec.errors import ComponentError
from fedrec.privacy.accounting.accountant import backend_of
from fedrec.privacy.accounting.events import LEAST_MULTIPLIER, MOST_MULTIPLIER
from fedrec.privacy.accounting.noise_pair import pair_of
from fedrec.privacy.accounting.sampling import Adjacency, Full, Sampling, Scheduled
from fedrec.privacy.mechanisms.base import Mechanism

_ROUNDS = 200  # as many reveal enough
_LEAST = 1e-9  # a delta below which accountants round
_MOST = 0.999
_GRID = 2e-3  # relative error of what is found on a grid


@lru_cache(maxsize=64)
def refuse_understated(
    mechanism: Mechanism,
    sampling: Sampling,
    adjacency: Adjacency,
    noise_multiplier: float,
    rounds: int,
    delta: float,
) -> None:
    """Refuse a mechanism whose stated cost cannot be true.

    Args:
        mechanism: the noise.
        sampling: how cohorts are drawn.
        adjacency: which data sets are neighbours.
        noise_multiplier: noise scale / sensitivity; 0: nothing is claimed.
        rounds: number of rounds.
        delta: of the run.

    Raises:
        ComponentError: there is no epsilon at the delta, all rounds cost less than some of them, or
            less than any noise of the stated standard deviation does.
    """
    if not LEAST_MULTIPLIER <= noise_multiplier <= MOST_MULTIPLIER:
        return
    if not mechanism.correlated:  # rounds are composed by accountants
        pair = pair_of(mechanism.release(Full(), adjacency, noise_multiplier))
        centre = pair.place(np.zeros(1))
        stated = float((pair.above(centre, 1.0) - pair.above(centre, 0.0))[0])
        least = least_distance(mechanism, Full(), noise_multiplier, 1)
        if stated < least * (1 - _GRID):
            raise _too_small(mechanism, least)
        return
    backend = backend_of("pld")
    one = mechanism.release(sampling, adjacency, noise_multiplier)

    def epsilon(number: int, at: float) -> float:
        return backend.epsilon(mechanism.releases(one, number, sampling), at).epsilon

    parts = {number: epsilon(number, delta) for number in (rounds, max(1, rounds // 2), 1)}
    whole = parts[rounds]
    most = max(parts, key=lambda number: parts[number])
    if not math.isfinite(whole):
        raise _wrong(mechanism, f"a finite epsilon at delta {delta:g}", "none")
    if parts[most] > whole * (1 + _GRID) + _GRID**2:
        expected = f"for {rounds} rounds at least the epsilon {parts[most]:.6g} of {most}"
        raise _wrong(mechanism, expected, f"{whole:.6g}")
    least = min(least_distance(mechanism, sampling, noise_multiplier, rounds), _MOST)
    if least > _LEAST and epsilon(rounds, least * (1 - _GRID)) == 0:
        raise _too_small(mechanism, least)


def least_distance(
    mechanism: Mechanism, sampling: Sampling, noise_multiplier: float, rounds: int
) -> float:
    """The least total variation distance between neighbours after some rounds."""
    separation = sampling.separation if isinstance(sampling, Scheduled) else 1
    several = sampling.rate == 1 and isinstance(sampling, Full | Scheduled)
    count = min(rounds, _ROUNDS) if several else 1
    moved = np.zeros(count)
    turns = sampling.most(count) if isinstance(sampling, Scheduled) else count
    moved[::separation][:turns] = 1.0
    mixing = toeplitz(mechanism.mixing(count), np.zeros(count))
    white = solve_triangular(mixing, moved, lower=True)
    squared = float(white @ white) / noise_multiplier**2
    return sampling.rate * squared / (4 + squared)


def _too_small(mechanism: Mechanism, least: float) -> ComponentError:
    deviation = f"standard deviation {mechanism.std:.4g} times the scale"
    expected = f"a delta at epsilon 0 of at least {least:.4g}, as of any noise of {deviation}"
    return _wrong(mechanism, expected, "less")


def _wrong(mechanism: Mechanism, expected: str, got: str) -> ComponentError:
    return ComponentError(
        f"the mechanism {mechanism.name!r} states a cost that cannot be true",
        expected=expected,
        got=got,
        fix="correct its pair, `releases`, `std` or `mixing`; or choose another privacy.mechanism",
    )
