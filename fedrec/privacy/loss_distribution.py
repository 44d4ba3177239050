# SPDX-License-Identifier: Apache-2.0
"""Privacy loss distributions on a grid: made pessimistically, composed by FFT, read off as epsilon.

Every step errs towards a larger epsilon: mass between two grid points is split so that the hockey-stick curve runs
straight in e^t between them, above the true convex one ("connect the dots", Doroshenko et al. 2022); mass beyond the
grid counts as infinite loss; the window of the FFT is chosen by a Chernoff bound, whose rest is added to delta; and the
FFT's own rounding noise, seen in its negative entries, is added too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.fft import next_fast_len


@dataclass(frozen=True, eq=False)
class Losses:
    """Distribution of a privacy loss.

    Attributes:
        step: distance of grid points.
        first: the first grid point is first * step.
        mass: `float64 [points]`, mass at each grid point.
        infinite: mass at infinite loss.
    """

    step: float
    first: int
    mass: np.ndarray
    infinite: float

    @cached_property
    def log_mass(self) -> np.ndarray:
        """`float64 [points]`: logarithms of the masses."""
        with np.errstate(divide="ignore"):
            return np.log(self.mass)

    @cached_property
    def grid(self) -> np.ndarray:
        """`float64 [points]`: the losses."""
        return (self.first + np.arange(len(self.mass))) * self.step


def connect_the_dots(first: int, step: float, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Mass at grid points from masses between them.

    Args:
        first: the first interval begins at first * step.
        step: width of the intervals.
        ours: mass of the first distribution in each interval of the loss, `[intervals]`.
        theirs: mass of the second.

    Returns:
        `[intervals + 1]`: the split of `ours` to both ends of its interval that keeps `theirs`, too.
    """
    lower = (first + np.arange(len(ours))) * step
    with np.errstate(over="ignore", under="ignore"):
        # theirs is about ours e^-t; in this order nothing overflows before the product is taken.
        scaled = np.where(theirs > 0, np.exp(np.log(np.maximum(theirs, 1e-320)) + lower), 0.0)
    up = np.clip((ours - scaled) / -np.expm1(-step), 0.0, ours)
    mass = np.append(ours - up, 0.0)
    mass[1:] += up
    return mass


def compose(parts: Sequence[tuple[Losses, int]], tail: float) -> tuple[Losses, float]:
    """Distribution of the sum of independent losses.

    Args:
        parts: distributions of one grid step, and how often each occurs.
        tail: mass that may be cut off.

    Returns:
        The sum's distribution, and what is to be added to any delta computed from it.
    """
    step = parts[0][0].step
    lowest, highest = _window(parts, tail)
    size = int(next_fast_len(highest - lowest + 1, real=True) or 0)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    log_finite = 0.0
    for losses, count in parts:
        folded = np.bincount((losses.first + np.arange(len(losses.mass))) % size, weights=losses.mass, minlength=size)
        spectrum *= np.fft.rfft(folded) ** count
        log_finite += count * math.log1p(-losses.infinite)
    mass = np.roll(np.fft.irfft(spectrum, size), -(lowest % size))
    noise = -float(mass[mass < 0].sum())
    composed = Losses(step, lowest, np.maximum(mass, 0.0), -math.expm1(log_finite))
    return composed, tail + 2 * noise


def epsilon_of(losses: Losses, delta: float) -> float:
    """Smallest epsilon >= 0 with hockey-stick divergence <= delta; infinite when the infinite loss alone exceeds it."""
    left = delta - losses.infinite
    if left <= 0:
        return math.inf
    positive = losses.grid > 0
    grid, mass = losses.grid[positive], losses.mass[positive]
    if -float(np.sum(mass * np.expm1(-grid))) <= left:
        return 0.0
    low, high = -1, len(grid) - 1  # the first grid point at which the divergence is small enough is in (low, high]
    while high - low > 1:
        middle = (low + high) // 2
        beyond = -float(np.sum(mass[middle:] * np.expm1(grid[middle] - grid[middle:])))
        low, high = (low, middle) if beyond <= left else (middle, high)
    # Up to that point it is (mass from there on) - e^(epsilon - grid point) (the same mass times e^-loss).
    whole, relative = float(np.sum(mass[high:])), float(np.sum(mass[high:] * np.exp(grid[high] - grid[high:])))
    return float(grid[high]) + math.log((whole - left) / relative)


def _window(parts: Sequence[tuple[Losses, int]], tail: float) -> tuple[int, int]:
    """Grid numbers outside of which the sum has mass <= `tail`, half of it on each side (Chernoff)."""
    rest, step = math.log(tail / 2), parts[0][0].step
    variance = sum(count * float(np.sum(np.square(losses.grid) * losses.mass)) for losses, count in parts)
    normal = math.sqrt(-2 * rest / max(variance, 1e-300))  # the best exponent if the sum were normal

    def reach(exponent: float, sign: int) -> float:
        return (_log_moment(parts, sign * exponent) - rest) / exponent

    up = _smallest(lambda exponent: reach(exponent, 1), normal)
    down = _smallest(lambda exponent: reach(exponent, -1), normal)
    lowest = sum(count * losses.first for losses, count in parts)
    highest = sum(count * (losses.first + len(losses.mass) - 1) for losses, count in parts)
    lowest, highest = max(lowest, math.floor(-down / step)), min(highest, math.ceil(up / step))
    return lowest, max(highest, lowest + 1)


def _smallest(bound: Callable[[float], float], near: float) -> float:
    """Least value found of a bound that first falls and then rises with its exponent (golden section); any is valid."""
    low, high = math.log(near) - 10, math.log(near) + 3
    ratio = (math.sqrt(5) - 1) / 2
    best = math.inf
    for _ in range(20):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        first, second = bound(math.exp(left)), bound(math.exp(right))
        best = min(best, first, second)
        low, high = (low, right) if first < second else (left, high)
    return best


def _log_moment(parts: Sequence[tuple[Losses, int]], exponent: float) -> float:
    """Logarithm of E e^(exponent L) of the sum."""
    total = 0.0
    for losses, count in parts:
        powers = exponent * losses.grid + losses.log_mass
        peak = float(powers.max())
        total += count * (peak + math.log(float(np.sum(np.exp(powers - peak)))))
    return total
