# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise, independent in every round, on updates clipped in the L2 norm."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from fedrec.privacy.accounting.noise_pair import NoisePair, nodes_of
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

    def positive_losses(self, order: int, knee: float) -> tuple[np.ndarray, np.ndarray]:
        """u = (2x - 1) / (2 z^2) has mean -1 / (2 z^2) and standard deviation 1 / z under Q; e^(a
        u) shifts it by a / z^2."""
        spread = 1 / self.multiplier
        peak = max(0.0, (order - 0.5) * spread**2)
        end = peak + 12 * spread
        fine = np.arange(0.0, min(knee + 40, end), min(0.5, spread / 2))
        begin = max(fine[-1], peak - 12 * spread)
        nodes, weights = nodes_of(np.append(fine, np.arange(begin, end, spread / 2) + spread / 2))
        log_density = (
            -0.5 * ((nodes + spread**2 / 2) / spread) ** 2
            - np.log(spread)
            - 0.5 * np.log(2 * np.pi)
        )
        return nodes, np.log(weights) + log_density


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
