# SPDX-License-Identifier: Apache-2.0
"""Calibration: the smallest noise with which a number of rounds stays within a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.accountant import backend_of
from fedrec.privacy.accounting.backend import DEFAULT_BACKEND, Backend
from fedrec.privacy.accounting.events import Release

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

    def keeps(multiplier: float) -> bool:
        return accountant.epsilon(releases(multiplier), delta).epsilon <= epsilon

    if not keeps(_MOST):
        raise ExperimentError(
            "this accountant cannot prove that epsilon for any noise",
            expected=(
                "a target that can be proven: Rényi orders up to 64 prove none below about 0.1 at"
                " delta 1e-5"
            ),
            got=f"epsilon {epsilon:g} at delta {delta:g}",
            fix="raise epsilon or delta, or use the backend pld",
        )
    low, high = _bracket(keeps)
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high  # the only one of the two that is verified to be sufficient


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
