# SPDX-License-Identifier: Apache-2.0
"""Laplace and Gaussian noise, independent in every round."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from fedrec.privacy.accounting.noise_pair import NoisePair
from fedrec.privacy.mechanisms.base import Mechanism, Memory
from fedrec.rng import NoiseSource

# Laplace noise, independent in every round, on updates clipped in the L1 norm, which costs far more
# noise in many dimensions.

_TAIL = 72.0  # noise is longer than its bound with probability exp(-_TAIL)


class LaplacePair(NoisePair):
    """Laplace distributions of scale `multiplier`.

    One coordinate that moves by the whole L1 sensitivity is the worst case in any number of
    dimensions: trade-off functions of shifts form a group, so that shifts in several coordinates
    are not easier to distinguish than their sum in one, and the Rényi curve is convex in the shift
    and 0 at no shift.
    """

    def above(self, x: np.ndarray, centre: float) -> np.ndarray:
        far = np.exp(-np.abs(x - centre) / self.multiplier) / 2
        return np.where(x >= centre, far, 1 - far)

    def place(self, log_ratio: np.ndarray) -> np.ndarray:
        z = self.multiplier
        x = (z * log_ratio + 1) / 2
        return np.where(log_ratio >= 1 / z, np.inf, np.where(log_ratio < -1 / z, -np.inf, x))

    def log_ratio(self, x: float) -> float:
        return (abs(x) - abs(x - 1)) / self.multiplier

    def reach(self, mass: float) -> float:
        return self.multiplier * -np.log(mass)

    def moments(self) -> tuple[float, float]:
        inverse = 1 / self.multiplier
        return inverse, inverse**2

    @property
    def pure_epsilon(self) -> float:
        """1 / noise multiplier."""
        return 1 / self.multiplier

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Mironov 2017, proposition 6."""
        z = self.multiplier
        finite = orders[np.isfinite(orders)]
        up = np.log(finite / (2 * finite - 1)) + (finite - 1) / z
        down = np.log((finite - 1) / (2 * finite - 1)) - finite / z
        curve = np.full(len(orders), 1 / z)
        curve[np.isfinite(orders)] = np.logaddexp(up, down) / (finite - 1)
        return curve


class Laplace(Mechanism):
    """The Laplace mechanism: its scale is b."""

    name = "laplace"
    order = 1
    pair = LaplacePair
    placements = ("central", "local")  # a sum of Laplace shares is not Laplace

    @property
    def std(self) -> float:
        """sqrt(2) b."""
        return math.sqrt(2)

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """Laplace of scale 1, `float64 [size]`."""
        return source.laplace(size, name, *address)

    def longest(self, scale: float, clients: int, values: int) -> float:
        """The L1 norm has Gamma's distribution (Boucheron, Lugosi, Massart 2013, section 2.4)."""
        count = clients * values
        return scale * (count + math.sqrt(2 * count * _TAIL) + _TAIL)


# Gaussian noise, independent in every round, on updates clipped in the L2 norm.


class GaussianPair(NoisePair):
    """Normal distributions of standard deviation `multiplier`. In many dimensions, by symmetry,
    they are one coordinate shifted by the sensitivity."""

    def above(self, x: np.ndarray, centre: float) -> np.ndarray:
        return ndtr((centre - x) / self.multiplier)

    def place(self, log_ratio: np.ndarray) -> np.ndarray:
        z = self.multiplier
        return z * z * log_ratio + 0.5

    def log_ratio(self, x: float) -> float:
        z = self.multiplier
        return (2 * x - 1) / (2 * z * z)

    def reach(self, mass: float) -> float:
        return self.multiplier * np.sqrt(-2 * np.log(mass))

    def moments(self) -> tuple[float, float]:
        inverse = 1 / self.multiplier
        return inverse**2 / 2, inverse**2

    @property
    def mu(self) -> float:
        """1 / noise multiplier."""
        return 1 / self.multiplier

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """a / (2 z^2)."""
        return orders / (2 * self.multiplier**2)


class Gaussian(Mechanism):
    """The Gaussian mechanism: its scale is the standard deviation."""

    name = "gaussian"
    pair = GaussianPair
    placements = ("central", "distributed", "local")
    needs = (
        "the sampler 'fixed-size', 'poisson' or 'full'; with 'min-separation' the mechanism"
        " { name = 'banded', bands = 1 }, which is the same noise, accounted by a client's rounds"
    )
    counts = True

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """Standard normal `float64 [size]`."""
        return source.gaussian(size, name, *address)

    def longest(self, scale: float, clients: int, values: int) -> float:
        """Laurent and Massart 2000, lemma 1."""
        return scale * math.sqrt(clients) * (math.sqrt(values) + math.sqrt(2 * _TAIL))
