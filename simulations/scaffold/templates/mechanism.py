# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise of which the next round takes a part back."""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.sampling import Full, Sampling
from fedrec.privacy.mechanisms.base import Mechanism, Memory
from fedrec.privacy.mechanisms.gaussian import GaussianPair
from fedrec.privacy.noise_source import NoiseSource


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    share: float = Field(default=0.3, ge=0, lt=1)
    """Share of a round's noise that the next round takes back, in [0, 1)."""


class Example(Mechanism):
    """The noise of round t is z_t - share * (that of round t - 1), with every client in every
    round."""

    Config = ExampleConfig
    config: ExampleConfig
    pair = GaussianPair
    samplings = (Full,)
    needs = "the sampler 'full'"

    @property
    def std(self) -> float:
        """Largest standard deviation of a value, over all rounds."""
        return 1 / math.sqrt(1 - self.config.share**2)

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """Noise of scale 1; what the next round needs goes to `memory`, also after a resume."""
        drawn = source.gaussian(size, name, *address)
        if name in memory:
            drawn = drawn - self.config.share * memory[name]
        memory[name] = drawn
        return drawn

    def mixing(self, rounds: int) -> np.ndarray:
        """What the noise of a round has of its own z and of earlier ones, `float64 [rounds]`."""
        return (-self.config.share) ** np.arange(rounds)

    def releases(self, one: Release, rounds: int, sampling: Sampling) -> dict[Release, int]:
        """One Gaussian release: undoing the correlation leaves white noise, and a client that
        moves every sum by the sensitivity moves it by 1 + share in all rounds but the first."""
        moved = math.sqrt(1 + (rounds - 1) * (1 + self.config.share) ** 2)
        return {Release("gaussian", sampling, one.adjacency, one.noise_multiplier / moved): 1}
