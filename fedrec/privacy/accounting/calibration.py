# SPDX-License-Identifier: Apache-2.0
"""Calibration: the smallest noise with which a number of rounds stays within a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.accountant import backend_of
from fedrec.privacy.accounting.events import DEFAULT_BACKEND, Backend, Release

_LEAST = 0.05
_MOST = 1e4


def calibrate(
    epsilon: float,
    delta: float,
    releases: Callable[[float], Mapping[Release, int]],
    *,
    backend: str | Backend = DEFAULT_BACKEND,
    tolerance: float = 1e-4,
) -> float:
    """Noise multiplier (noise scale / sensitivity) for a target.

    Args:
        epsilon: target for all rounds together, > 0.
        delta: in [0, 1).
        releases: what all rounds cost at a noise multiplier.
        backend: accountant of the target.
        tolerance: the multiplier exceeds the smallest valid one by at most this share.

    Returns:
        A multiplier, at least 0.05, whose epsilon by the same accountant is at most the target.

    Raises:
        ExperimentError: no noise multiplier up to 10,000 is sufficient.
    """
    accountant = backend_of(backend)

    @cache
    def spent(multiplier: float) -> float:
        return accountant.epsilon(releases(multiplier), delta).epsilon

    def keeps(multiplier: float) -> bool:
        return spent(multiplier) <= epsilon

    if not keeps(_MOST):
        tightest = accountant is backend_of("pld")
        orders = "Rényi orders up to 64 prove none below about 0.1 at delta 1e-5"
        raise ExperimentError(
            "this accountant cannot prove that epsilon for any noise",
            expected=f"a target that noise of up to {_MOST:,.0f} sensitivities reaches"
            + ("" if tightest else f": {orders}"),
            got=f"epsilon {epsilon:g} at delta {delta:g}",
            fix="raise epsilon or delta" + ("" if tightest else ", or use the backend pld"),
        )
    low, high = _bracket(keeps)
    below, above = _secant(spent, epsilon, (low, high), tolerance / 16)
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        known = middle >= above or (middle > below and keeps(middle))
        low, high = (low, middle) if known else (middle, high)
    return high if keeps(high) else above  # verified to be sufficient


def _bracket(keeps: Callable[[float], bool]) -> tuple[float, float]:
    """A multiplier that is too small and a sufficient one, at most a factor of 2 apart."""
    if keeps(1.0):
        high = 1.0
        while high > _LEAST and keeps(high / 2):
            high /= 2
        return (max(high / 2, _LEAST), high) if high > _LEAST else (_LEAST, _LEAST)
    low = 1.0
    while not keeps(2 * low):
        low *= 2
    return low, 2 * low


def _secant(
    spent: Callable[[float], float], epsilon: float, bracket: tuple[float, float], near: float
) -> tuple[float, float]:
    """A multiplier that is too small and a sufficient one, in a share of about `near` of each other
    where a few secants reach that, as epsilon is nearly a power of the multiplier. Smaller and
    larger multipliers than these need not be evaluated."""
    low, high = bracket
    for _ in range(8):
        if high <= low * (1 + 4 * near):
            break
        probe = math.sqrt(low * high)
        if 0 < spent(high) <= epsilon < spent(low) < math.inf:
            over = math.log(spent(low) / epsilon)
            share = over / math.log(spent(low) / spent(high))
            # just beyond the root, on the side that is farther from it
            aim = low * (high / low) ** share * (1 + near if share < 0.5 else 1 - near)
            probe = aim if low < aim < high else probe
        low, high = (low, probe) if spent(probe) <= epsilon else (probe, high)
    return low, high
