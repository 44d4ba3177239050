# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise, independent in every round, on updates clipped in the L2 norm."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from fedrec.privacy.accounting.noise_pair import NoisePair
from fedrec.privacy.mechanisms.base import Mechanism, Memory
from fedrec.privacy.noise_source import NoiseSource

_TAIL = 72.0  # noise is longer than its bound with probability exp(-_TAIL)


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
