# SPDX-License-Identifier: Apache-2.0
"""Epsilon at a given delta between two normal distributions (Andrew et al. 2023, section 4): the
set where the log density ratio exceeds epsilon is bounded by the roots of a quadratic. For equal
variances it is that of `fedrec.privacy.accounting.gdp`.
"""

from __future__ import annotations

import numpy as np
from scipy.special import log_ndtr

_HIGHEST = 1e6


def epsilon_of_normals(
    means: tuple[np.ndarray, np.ndarray], sds: tuple[np.ndarray, np.ndarray], delta: float
) -> np.ndarray:
    """Epsilon at delta between normal distributions, the larger of both directions.

    Args:
        means: of the first and of the second distribution, `float [n]` each.
        sds: their standard deviations, `float [n]` each, >= 0.
        delta: in (0, 1).

    Returns:
        `float64 [n]`; infinity where a standard deviation is 0 and the means differ.
    """
    (m0, m1) = np.atleast_1d(*means)
    (s0, s1) = np.atleast_1d(*sds)
    found = np.full(len(m0), np.inf)
    same = (m0 == m1) & (s0 == s1)
    found[same] = 0.0
    usable = (s0 > 0) & (s1 > 0) & ~same
    # In units of the second distribution: N(a, s^2) against N(0, 1).
    shift = (m0[usable] - m1[usable]) / s1[usable]
    scale = s0[usable] / s1[usable]
    found[usable] = np.maximum(
        _one_way(shift, scale, delta), _one_way(-shift / scale, 1 / scale, delta)
    )
    return found


def _one_way(shift: np.ndarray, scale: np.ndarray, delta: float) -> np.ndarray:
    """Epsilon with which N(shift, scale^2) is hidden in N(0, 1), by bisection for all at once."""
    low = np.zeros(len(shift))
    high = np.ones(len(shift))
    while (above := _spent(high, shift, scale) > delta).any() and high.max(initial=0.0) < _HIGHEST:
        low = np.where(above, high, low)
        high = np.where(above, 2 * high, high)
    for _ in range(45):
        middle = (low + high) / 2
        above = _spent(middle, shift, scale) > delta
        low = np.where(above, middle, low)
        high = np.where(above, high, middle)
    zero = _spent(np.zeros(len(shift)), shift, scale) <= delta
    return np.where(zero, 0.0, np.where(high < _HIGHEST, high, np.inf))


def _spent(epsilon: np.ndarray, shift: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """P(A) - e^eps Q(A) for P = N(shift, scale^2), Q = N(0, 1) and A where log dP/dQ > eps."""
    a = (1 - 1 / scale**2) / 2  # log dP/dQ = a x^2 + b x + c
    b = shift / scale**2
    c = -np.square(shift / scale) / 2 - np.log(scale) - epsilon
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        flat = np.abs(a) < 1e-12
        root = np.sqrt(np.maximum(b * b - 4 * a * c, 0.0))
        # avoids the difference of two nearly equal numbers
        q = -(b + np.where(b < 0, -1.0, 1.0) * root) / 2
        first = np.where(flat, -c / b, q / a)
        second = np.where(flat | (q == 0), np.inf, c / q)
        left = np.minimum(first, second)
        right = np.maximum(first, second)
        none = ~flat & (b * b - 4 * a * c <= 0)
        inside = _masses(left, right, epsilon, shift, scale)
        outside = _masses(np.full_like(left, -np.inf), left, epsilon, shift, scale)
        outside = outside + _masses(right, np.full_like(right, np.inf), epsilon, shift, scale)
        whole = 1 - np.exp(np.minimum(epsilon, 700.0))
        ray_up = _masses(-c / b, np.full_like(left, np.inf), epsilon, shift, scale)
        ray_down = _masses(np.full_like(left, -np.inf), -c / b, epsilon, shift, scale)
    curved = np.where(a > 0, np.where(none, whole, outside), np.where(none, 0.0, inside))
    return np.where(flat, np.where(b > 0, ray_up, ray_down), curved)


def _masses(
    left: np.ndarray, right: np.ndarray, epsilon: np.ndarray, shift: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """P - e^eps Q of the interval (left, right)."""
    p = _interval((left - shift) / scale, (right - shift) / scale)
    with np.errstate(divide="ignore"):
        return np.exp(p) - np.exp(np.minimum(epsilon + _interval(left, right), 700.0))


def _interval(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Log of the standard normal mass of (left, right), without loss in either tail."""
    flip = left > 0
    low = np.where(flip, -right, left)
    high = np.where(flip, -left, right)
    upper = log_ndtr(high)
    lower = log_ndtr(low)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(
            np.isneginf(upper), -np.inf, upper + np.log1p(-np.exp(np.minimum(lower - upper, 0.0)))
        )
