# SPDX-License-Identifier: Apache-2.0
"""The banded Toeplitz matrix whose noise, at the same cost, is least on the workload.

The mean over the rounds of `errors`, times the squared norm of C's first column, is minimised by
L-BFGS with its exact gradient. The minimum is that of clients whose rounds are at least as far
apart as C has bands, however often they take part (Choquette-Choo et al. 2023).

Where this differs from the paper: it optimises all entries of the band, which pays for short runs
only; a Toeplitz matrix has as many numbers as bands (McKenna 2024).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.optimize import minimize

from fedrec.privacy.factorisation.coefficients import prefix_sums, quotient, square_root


@lru_cache(maxsize=16)
def optimal_bands(bands: int, rounds: int, momentum: float = 0.0) -> tuple[float, ...]:
    """The first coefficients of C, from 1.

    Args:
        bands: their number.
        rounds: number of rounds T; bands beyond it are left out.
        momentum: of the workload.
    """
    bands = min(bands, rounds)
    workload = prefix_sums(rounds, momentum)
    start = square_root(bands, momentum)[1:]
    options = {"maxiter": 5000, "maxfun": 50_000, "ftol": 0.0, "gtol": 1e-12, "maxcor": 30}
    found = minimize(
        _loss_and_gradient, start, args=(workload,), jac=True, method="L-BFGS-B", options=options
    )
    return (1.0, *found.x.tolist())


def _loss_and_gradient(later: np.ndarray, workload: np.ndarray) -> tuple[float, np.ndarray]:
    """The logarithm of the loss, and its gradient by all coefficients but the first."""
    from scipy.signal import fftconvolve  # as in `quotient`

    column = np.append(1.0, later)
    rounds = len(workload)
    noise = quotient(workload, column)
    left = np.arange(rounds, 0, -1) / rounds
    error = float(left @ np.square(noise))
    square = float(column @ column)
    # B moves by -C^-1 (dC B): the adjoint filter takes the loss's slope back to C
    slope = quotient((2 * left * noise)[::-1], column)
    by_column = -fftconvolve(slope, noise)[rounds - len(column) : rounds][::-1]
    return float(np.log(error * square)), (by_column / error + 2 * column / square)[1:]
