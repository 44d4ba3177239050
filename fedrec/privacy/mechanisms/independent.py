# SPDX-License-Identifier: Apache-2.0
"""Laplace and Gaussian noise, independent in every round."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedrec.privacy.accounting.sampling import Sampling
from fedrec.privacy.mechanisms.base import Mechanism, Memory
from fedrec.rng import NoiseSource

if TYPE_CHECKING:
    from dp_accounting.dp_event import DpEvent


class Laplace(Mechanism):
    """The Laplace mechanism: its scale is b. Updates are clipped in the L1 norm, which costs far
    more noise in many dimensions."""

    name = "laplace"
    order = 1
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

    def dp_event(self, noise_multiplier: float, rounds: int, sampling: Sampling) -> DpEvent:
        """Independent Laplace releases."""
        from fedrec.privacy.accounting.losses import dp_event, of_rounds  # imports dp-accounting

        return of_rounds(dp_event.LaplaceDpEvent(noise_multiplier), rounds, sampling)


class Gaussian(Mechanism):
    """The Gaussian mechanism: its scale is the standard deviation."""

    name = "gaussian"
    placements = ("central", "distributed", "local")

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """Standard normal `float64 [size]`."""
        return source.gaussian(size, name, *address)

    def dp_event(self, noise_multiplier: float, rounds: int, sampling: Sampling) -> DpEvent:
        """Independent Gaussian releases."""
        from fedrec.privacy.accounting.losses import dp_event, of_rounds  # imports dp-accounting

        return of_rounds(dp_event.GaussianDpEvent(noise_multiplier), rounds, sampling)
