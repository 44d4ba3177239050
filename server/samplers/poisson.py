# SPDX-License-Identifier: Apache-2.0
"""A Poisson cohort: every client takes part independently with the same probability.

The size of the cohort varies, and it may be empty. This is the sampling that amplification bounds
for add/remove adjacency assume.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from server.samplers.base import SizedSampler


class PoissonConfig(Config):
    """Settings of Poisson sampling."""

    cohort: float = Field(default=20.0, gt=0)
    """Expected number of clients per round."""


class PoissonSampler(SizedSampler):
    """Independent sampling with probability cohort / clients."""

    name = "poisson"
    Config = PoissonConfig
    config: PoissonConfig

    @property
    def probability(self) -> float:
        """Probability q that a client takes part in a round."""
        return self.config.cohort / len(self.clients)

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw distinct clients, `int64 [clients]`."""
        return self.clients[random.random(len(self.clients)) < self.probability]
