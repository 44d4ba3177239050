# SPDX-License-Identifier: Apache-2.0
"""Rényi differential privacy, whose curves add up over releases and are turned into epsilon once,
and Gaussian differential privacy, whose squared parameters add up.

Where this differs from the papers: they turn a curve into epsilon by R(a) + ln(1/delta) / (a - 1).
Proposition 12 of Canonne, Kamath and Steinke (2020) gives the smaller

    epsilon = R(a) + ln(1 - 1/a) - ln(delta a) / (a - 1)

for any order a > 1. At order infinity R is the pure epsilon, whatever delta is.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedrec.privacy.accounting.events import GAUSSIAN, Release

INTEGER_ORDERS = np.arange(2, 65)
ORDERS = np.append(INTEGER_ORDERS.astype(np.float64), np.inf)


def epsilon_of(curves: np.ndarray, delta: float) -> np.ndarray:
    """Turn RDP curves into epsilon.

    Args:
        curves: R at `ORDERS`, `[..., orders]`.
        delta: in [0, 1).

    Returns:
        Epsilon at the best order, `[...]`, >= 0.
    """
    orders = INTEGER_ORDERS
    with np.errstate(divide="ignore"):
        shift = np.log1p(-1 / orders) - (np.log(np.float64(delta)) + np.log(orders)) / (orders - 1)
    return np.maximum(curves + np.append(shift, 0.0), 0.0).min(axis=-1)


def unsampled(orders: np.ndarray, release: Release) -> np.ndarray:
    """RDP of a release without sampling, `[orders]`, at orders > 1: a / (2 z^2) for Gaussian noise;
    Mironov 2017, proposition 6, for Laplace noise."""
    z = release.noise_multiplier
    if release.mechanism == GAUSSIAN:
        return orders / (2 * z**2)
    finite = orders[np.isfinite(orders)]
    up = np.log(finite / (2 * finite - 1)) + (finite - 1) / z
    down = np.log((finite - 1) / (2 * finite - 1)) - finite / z
    curve = np.full(len(orders), 1 / z)
    curve[np.isfinite(orders)] = np.logaddexp(up, down) / (finite - 1)
    return curve


def pure_epsilon(release: Release) -> float:
    """Pure epsilon of one release, amplified by sampling: ln(1 + q (e^(1 / z) - 1)) for Laplace
    noise; infinite for Gaussian noise."""
    if release.mechanism == GAUSSIAN:
        return math.inf
    return amplified(1 / release.noise_multiplier, release.sampling.rate)


def amplified(epsilon: float, rate: float) -> float:
    """Amplified epsilon of an epsilon-DP release of a sample (Balle, Barthe and Gaboardi 2018).

    Args:
        epsilon: on the sample, >= 0.
        rate: share of the rows that are sampled, in (0, 1].
    """
    if rate == 1:
        return epsilon
    # log(1 + q expm1(x)) would overflow for the large x of very little noise
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + epsilon))


# Gaussian differential privacy (Dong, Roth and Su 2022): epsilon, delta and the parameter mu of
# Gaussian releases, mu = sensitivity / noise; the squares of several releases' mu add up.
#
#     delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

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
    if gdp_delta(0.0, mu) <= delta:
        return 0.0
    upper = 1.0
    while gdp_delta(upper, mu) > delta:
        upper *= 2
        if upper > _LARGEST:
            return math.inf
    return _root(lambda epsilon: gdp_delta(epsilon, mu) - delta, 0.0, upper)


@functools.lru_cache(maxsize=1024)
def gdp_parameter(epsilon: float, delta: float) -> float:
    """The largest mu whose release is (epsilon, delta)-private."""
    upper = 1.0
    while gdp_delta(epsilon, upper) <= delta:
        upper *= 2
    return _root(lambda mu: gdp_delta(epsilon, mu) - delta, 1e-12, upper)


def _root(excess: Callable[[float], float], lower: float, upper: float) -> float:
    from scipy.optimize import brentq  # importing it is slow, and most runs need no root

    root: Any = brentq(excess, lower, upper, xtol=1e-12)
    return float(root)
