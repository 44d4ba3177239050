# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise of a banded matrix factorisation: C^-1 z, where C is lower triangular and Toeplitz
with the first coefficients of (1 - x)^(-1/2) in its bands (Choquette-Choo et al. 2023, "(Amplified)
Banded Matrix Factorization"; Henzinger, Upadhyay and Upadhyay 2023 for the square root)."""

import math

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.sampling import Sampling, Scheduled
from fedrec.privacy.mechanisms.base import Mechanism, Memory
from fedrec.privacy.mechanisms.gaussian import GaussianPair
from fedrec.privacy.noise_source import NoiseSource


class BandedConfig(Config):
    """Settings of banded noise."""

    bands: int = Field(default=4, ge=1, le=1000)
    """Number of bands b: the noise of a round takes back parts of that of the b - 1 rounds before
    it; 1 is independent noise."""


class Banded(Mechanism):
    """Noise of which later rounds take parts back, for clients whose rounds are b or more apart."""

    Config = BandedConfig
    paper = "Choquette-Choo et al. 2023"
    config: BandedConfig
    pair = GaussianPair
    samplings = (Scheduled,)

    def __init__(self, config: BandedConfig, name: str) -> None:
        super().__init__(config, name)
        places = np.arange(1, config.bands)
        self.coefficients = np.cumprod(np.append(1.0, (2 * places - 1) / (2 * places)))
        self.needs = f"a sampler whose schedule separates a client's rounds by {config.bands}"

    @property
    def std(self) -> float:
        """Largest standard deviation of a value: the norm of the last row of C^-1, which grows with
        the rounds to a limit."""
        row = np.zeros(200 * self.config.bands)
        row[0] = 1.0
        for place in range(1, len(row)):
            taken = self.coefficients[1 : place + 1]
            row[place] = -taken @ row[place - len(taken) : place][::-1]
        return float(np.linalg.norm(row))

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """A row of C^-1 z, `float64 [size]`; `memory` keeps the b - 1 last ones, the last first."""
        drawn = source.gaussian(size, name, *address)
        earlier = memory.get(name, np.empty((0, size)))
        for coefficient, noise in zip(self.coefficients[1:], earlier, strict=False):
            drawn = drawn - coefficient * noise
        memory[name] = np.concatenate([drawn[None], earlier])[: self.config.bands - 1]
        return drawn

    def fits(self, sampling: Sampling) -> bool:
        """Columns of C that are b or more apart have no row in common."""
        return isinstance(sampling, Scheduled) and sampling.separation >= self.config.bands

    def releases(self, one: Release, rounds: int, sampling: Sampling) -> dict[Release, int]:
        """One Gaussian release: with z in place of C^-1 z, a client moves it by the columns of its
        rounds, which are orthogonal. Columns of late rounds are cut off, so that the most is moved
        by a client of the first round and every `separation` rounds after it."""
        assert isinstance(sampling, Scheduled)
        firsts = np.arange(sampling.most(rounds)) * sampling.separation
        left = np.minimum(rounds - firsts, self.config.bands)
        norms = np.cumsum(np.square(self.coefficients))[left - 1]
        moved = math.sqrt(float(norms.sum()))
        return {Release("gaussian", sampling, one.adjacency, one.noise_multiplier / moved): 1}
