# SPDX-License-Identifier: Apache-2.0
"""First columns of lower triangular Toeplitz matrices `[rounds, rounds]`: power series."""

from __future__ import annotations

import numpy as np


def prefix_sums(rounds: int, momentum: float = 0.0) -> np.ndarray:
    """The workload of a server that adds up what rounds release, `float64 [rounds]`: 1 / ((1 - x)
    (1 - momentum x)), where the server adds a running sum with a momentum in [0, 1)."""
    return np.cumsum(momentum ** np.arange(rounds))


def square_root(bands: int, momentum: float = 0.0) -> np.ndarray:
    """The first coefficients of the square root of that workload, `float64 [bands]` (Fichtenberger,
    Henzinger and Upadhyay 2023; with momentum Kalinin and Lampert 2024, theorem 1); non-negative
    and non-increasing, from 1."""
    places = np.arange(1, bands)
    sums = np.cumprod(np.append(1.0, (2 * places - 1) / (2 * places)))
    return np.convolve(sums, sums * momentum ** np.arange(bands))[:bands]


def inverse(column: np.ndarray, rounds: int) -> np.ndarray:
    """The first column of the inverse, `float64 [rounds]`; missing coefficients are 0."""
    return quotient(np.eye(1, rounds)[0], column)


def quotient(series: np.ndarray, column: np.ndarray) -> np.ndarray:
    """A power series `[rounds]` divided by another, `[bands]`, to as many terms as the first has,
    `float64 [rounds]`."""
    from scipy.signal import lfilter  # importing it is slow, and most mechanisms do without

    return np.asarray(lfilter([1.0], column[: len(series)], series))


def is_decreasing(column: np.ndarray) -> bool:
    """Whether no coefficient of `[bands]` is negative or above the one before."""
    return bool((column >= 0).all() and (np.diff(column) <= 0).all())
