# SPDX-License-Identifier: Apache-2.0
"""Calibration: the smallest noise with which a number of rounds stays within a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

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
        releases: cost of all rounds at a noise multiplier.
        backend: accountant of the target.
        tolerance: the multiplier exceeds the smallest valid one by at most this share.

    Returns:
        A multiplier, at least 0.05, whose epsilon by the same accountant is at most the target.

    Raises:
        ExperimentError: no noise multiplier up to 10,000 is sufficient.
    """
    from scipy.optimize import brentq  # importing it is slow

    accountant = backend_of(backend)

    @cache
    def spent(multiplier: float) -> float:
        return accountant.epsilon(releases(multiplier), delta).epsilon

    def excess(log_multiplier: float) -> float:
        """Logarithm of epsilon / target, which is nearly linear in that of the multiplier."""
        ratio = spent(math.exp(log_multiplier)) / epsilon
        return math.log(min(max(ratio, 1e-9), 1e9))

    if spent(_MOST) > epsilon:
        tightest = accountant is backend_of("pld")
        orders = "Rényi orders up to 64 prove none below about 0.1 at delta 1e-5"
        raise ExperimentError(
            "this accountant cannot prove that epsilon for any noise",
            expected=f"a target that noise of up to {_MOST:,.0f} sensitivities reaches"
            + ("" if tightest else f": {orders}"),
            got=f"epsilon {epsilon:g} at delta {delta:g}",
            fix="raise epsilon or delta" + ("" if tightest else ", or use the backend pld"),
        )
    high = 1.0
    while spent(high) > epsilon:
        high *= 2
    while high > _LEAST and spent(high / 2) <= epsilon:
        high /= 2
    if high <= _LEAST:
        return _LEAST
    bracket = math.log(high / 2), math.log(high)
    root: Any = brentq(excess, *bracket, xtol=tolerance / 4)
    multiplier = math.exp(root)
    while spent(multiplier) > epsilon:
        multiplier *= 1 + tolerance / 3
    return max(multiplier, _LEAST)
