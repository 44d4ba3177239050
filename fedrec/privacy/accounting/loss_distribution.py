# SPDX-License-Identifier: Apache-2.0
"""Privacy loss distributions on a grid: pessimistic discretisation, composition by FFT, and
epsilon.

Every step errs towards a larger epsilon: mass between two grid points is split so that the
hockey-stick curve is linear in e^t between them, above the true convex one ("connect the dots",
Doroshenko et al. 2022); mass beyond the grid counts as infinite loss; the window of the FFT is
chosen by a Chernoff bound, whose rest is added to delta; and the FFT's own rounding noise, seen in
its negative entries, is added too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.fft import next_fast_len

_FARTHEST = 120  # eighths of a doubling, from the best exponent of a normal distribution


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

    @cached_property
    def second_moment(self) -> float:
        """Mean of the squared finite losses."""
        return float(np.sum(np.square(self.grid) * self.mass))

    def log_moment(self, exponent: float) -> float:
        """Logarithm of E e^(exponent L) over the finite losses; computed once for each exponent."""
        known: dict[float, float] = self.__dict__.setdefault("_log_moments", {})
        if exponent not in known:
            powers = exponent * self.grid + self.log_mass
            peak = float(powers.max())
            known[exponent] = peak + math.log(float(np.sum(np.exp(powers - peak))))
        return known[exponent]

    def spectrum(self, size: int) -> np.ndarray:
        """`complex128 [size // 2 + 1]`: Fourier transform of the masses, folded to a size; the last
        one is cached."""
        kept: tuple[int, np.ndarray] | None = self.__dict__.get("_spectrum")
        if kept is None or kept[0] != size:
            places = (self.first + np.arange(len(self.mass))) % size
            kept = size, np.fft.rfft(np.bincount(places, weights=self.mass, minlength=size))
            self.__dict__["_spectrum"] = kept
        return kept[1]


def connect_the_dots(first: int, step: float, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Mass at grid points from masses between them.

    Args:
        first: the first interval begins at first * step.
        step: width of the intervals.
        ours: mass of the first distribution in each interval of the loss, `[intervals]`.
        theirs: mass of the second.

    Returns:
        `[intervals + 1]`: the split of `ours` to both ends of its interval that keeps `theirs`,
        too.
    """
    lower = (first + np.arange(len(ours))) * step
    with np.errstate(over="ignore", under="ignore"):
        # theirs is about ours e^-t; this order avoids an overflow before the product.
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
        The sum's distribution, and a term to add to any delta computed from it.
    """
    step = parts[0][0].step
    lowest, highest = _window(parts, tail)
    size = _size(highest - lowest + 1)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    log_finite = 0.0
    for losses, count in parts:
        spectrum *= losses.spectrum(size) ** count
        log_finite += count * math.log1p(-losses.infinite)
    mass = np.roll(np.fft.irfft(spectrum, size), -(lowest % size))
    noise = -float(mass[mass < 0].sum())
    composed = Losses(step, lowest, np.maximum(mass, 0.0), -math.expm1(log_finite))
    return composed, tail + 2 * noise


def epsilon_of(losses: Losses, delta: float) -> float:
    """Smallest epsilon >= 0 with hockey-stick divergence <= delta; infinite when the infinite loss
    alone exceeds it."""
    left = delta - losses.infinite
    if left <= 0:
        return math.inf
    positive = losses.grid > 0
    grid = losses.grid[positive]
    mass = losses.mass[positive]
    if -float(np.sum(mass * np.expm1(-grid))) <= left:
        return 0.0
    # the first grid point at which the divergence is small enough is in (low, high]
    low = -1
    high = len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        beyond = -float(np.sum(mass[middle:] * np.expm1(grid[middle] - grid[middle:])))
        low, high = (low, middle) if beyond <= left else (middle, high)
    # Up to that point it is (mass from there on) - e^(epsilon - grid point) (the same mass times
    # e^-loss).
    whole = float(np.sum(mass[high:]))
    relative = float(np.sum(mass[high:] * np.exp(grid[high] - grid[high:])))
    return float(grid[high]) + math.log((whole - left) / relative)


def _size(points: int) -> int:
    """A size for the FFT, slightly larger than needed, so that windows of similar width have the
    same size."""
    coarse = 1 << max(0, points.bit_length() - 5)
    return int(next_fast_len(-(-points // coarse) * coarse, real=True) or 0)


def _window(parts: Sequence[tuple[Losses, int]], tail: float) -> tuple[int, int]:
    """Grid numbers outside of which the sum has mass <= `tail`, half of it on each side
    (Chernoff)."""
    rest = math.log(tail / 2)
    step = parts[0][0].step
    variance = sum(count * losses.second_moment for losses, count in parts)
    # the best exponent if the sum were normal
    normal = math.sqrt(-2 * rest / max(variance, 1e-300))

    def reach(exponent: float, sign: int) -> float:
        moment = sum(count * losses.log_moment(sign * exponent) for losses, count in parts)
        return (moment - rest) / exponent

    up = _smallest(lambda exponent: reach(exponent, 1), normal)
    down = _smallest(lambda exponent: reach(exponent, -1), normal)
    lowest = sum(count * losses.first for losses, count in parts)
    highest = sum(count * (losses.first + len(losses.mass) - 1) for losses, count in parts)
    lowest = max(lowest, math.floor(-down / step))
    highest = min(highest, math.ceil(up / step))
    return lowest, max(highest, lowest + 1)


def _smallest(bound: Callable[[float], float], near: float) -> float:
    """Smallest value found of a bound that first falls and then rises with its exponent; every
    value is valid.

    Exponents are powers of 2^(1/8): after one more release the minimum is at the same exponent or
    the next one, for which the moments are cached. Strides double while the bound falls.
    """
    start = place = round(8 * math.log2(near))
    best = bound(2.0 ** (place / 8))
    stride = 1
    while stride:
        for step in (-stride, stride):
            beyond = abs(place + step - start) > _FARTHEST
            found = math.inf if beyond else bound(2.0 ** ((place + step) / 8))
            if found < best:
                place = place + step
                best = found
                stride *= 2
                break
        else:
            stride //= 2
    return best
