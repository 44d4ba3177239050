# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise of a banded matrix factorisation: later rounds take back parts of the noise of
earlier ones, so that running sums have less of it; no secret cohort is needed (Choquette-Choo et
al. 2023, "(Amplified) Banded Matrix Factorization").

Noise is C^-1 z, where C is lower triangular and Toeplitz with `bands` coefficients: those of the
square root of the workload, or the best ones for a number of rounds. The noise of a round is z_t
minus parts of the noise of the `bands - 1` rounds before, which is all that is kept.

Where this differs from the paper: it optimises each entry of the band and normalises the columns; C
is Toeplitz here (McKenna 2024). So the optimiser needs no constraints, a run may become longer, and
noise of earlier rounds stays right.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.privacy.factorisation.coefficients import square_root
from fedrec.privacy.factorisation.optimiser import optimal_bands
from fedrec.privacy.mechanisms._toeplitz import ToeplitzMechanism
from fedrec.privacy.mechanisms.base import Memory
from fedrec.privacy.noise_source import NoiseSource


class BandedConfig(Config):
    """Settings of banded noise."""

    bands: int = Field(default=16, ge=1, le=1000)
    """Number of bands b of C: the noise of a round takes back parts of that of the b - 1 rounds
    before it; 1 is independent noise. Best is the separation of a client's rounds."""
    optimised_for: int = Field(default=0, ge=0, le=10_000)
    """Number of rounds for whose running sums the coefficients are best; 0: those of the square
    root, which need no number of rounds."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of the server, in [0, 1), for which coefficients are chosen; any value is as
    private."""


class Banded(ToeplitzMechanism):
    """Noise of which later rounds take parts back, for clients whose rounds are b or more apart, or
    everybody in each round."""

    name = "banded"
    Config = BandedConfig
    paper = "(Amplified) Banded Matrix Factorization (Choquette-Choo et al. 2023)"
    config: BandedConfig

    def __init__(self, config: BandedConfig, name: str) -> None:
        super().__init__(config, name)
        bands = config.bands
        if config.optimised_for:
            self._column = np.array(optimal_bands(bands, config.optimised_for, config.momentum))
        else:
            self._column = square_root(bands, config.momentum)
        self.needs = (
            f"a sampler that separates a client's rounds by {bands}, such as 'min-separation' with"
            f" separation = {bands}; with coefficients that do not increase and known cohorts, any"
            " separation, or 'full'"
        )

    def column(self, rounds: int) -> np.ndarray:
        """The coefficients, `float64 [bands]`; fewer if there are fewer rounds."""
        return self._column[:rounds]

    @property
    def momentum(self) -> float:
        """The setting."""
        return self.config.momentum

    @property
    def kept(self) -> int:
        """Noise of the last b - 1 rounds."""
        return len(self._column) - 1

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """A row of C^-1 z, `float64 [size]`; `memory` keeps the b - 1 last ones, each in the place
        of one that is no longer needed, and the number of rows so far."""
        drawn = source.gaussian(size, name, *address)
        if not self.kept:
            return drawn
        counter = f"{name} rows"
        rows = int(memory[counter]) if counter in memory else 0
        for back in range(1, min(rows, self.kept) + 1):
            drawn -= self._column[back] * memory[f"{name} {(rows - back) % self.kept}"]
        memory[f"{name} {rows % self.kept}"] = drawn
        memory[counter] = np.asarray(rows + 1)
        return drawn
