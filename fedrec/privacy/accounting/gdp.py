# SPDX-License-Identifier: Apache-2.0
"""Gaussian differential privacy (Dong, Roth and Su 2022): epsilon, delta and the parameter mu of
Gaussian releases, mu = sensitivity / noise; the squares of several releases' mu add up.

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

_LARGEST = 1e6  # epsilon above which there is no meaningful privacy


def gdp_delta(epsilon: float, mu: float) -> float:
    """The smallest delta at which a Gaussian release of parameter mu is (epsilon,
    delta)-private."""
    if mu == 0:
        return 0.0
    from scipy.special import log_ndtr, ndtr  # slow to import, and not needed without privacy

    return max(
        0.0, float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))
    )


@functools.lru_cache(maxsize=1024)  # users with equal budgets have equal costs
def gdp_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon >= 0 at which a Gaussian release of parameter mu is (epsilon,
    delta)-private; 0 for mu <= 0, infinity for mu = infinity."""
    return smallest_epsilon(lambda epsilon: gdp_delta(epsilon, mu), delta)


@functools.lru_cache(maxsize=1024)
def gdp_parameter(epsilon: float, delta: float) -> float:
    """The largest mu whose release is (epsilon, delta)-private."""
    upper = 1.0
    while gdp_delta(epsilon, upper) <= delta:
        upper *= 2
    return _root(lambda mu: gdp_delta(epsilon, mu) - delta, 1e-12, upper)


def smallest_epsilon(
    spent: Callable[[float], float], delta: float, *, largest: float = _LARGEST
) -> float:
    """The smallest epsilon in [0, about `largest`] at which a falling function is at most delta;
    else infinity."""
    if spent(0.0) <= delta:
        return 0.0
    upper = 1.0
    while spent(upper) > delta:
        upper *= 2
        if upper > largest:
            return math.inf
    return _root(lambda epsilon: spent(epsilon) - delta, 0.0, upper)


def _root(excess: Callable[[float], float], lower: float, upper: float) -> float:
    from scipy.optimize import brentq  # importing it is slow, and most runs need no root

    root: Any = brentq(excess, lower, upper, xtol=1e-12)
    return float(root)
