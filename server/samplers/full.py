# SPDX-License-Identifier: Apache-2.0
"""Every client in every round.

Under differential privacy there is no amplification by sampling, and the cohort need not be secret.
A few rounds with all clients need less noise for the same epsilon than many rounds with a sample.
"""

from __future__ import annotations

import numpy as np

from fedrec.config import Config
from server.samplers.base import Sampler


class FullConfig(Config):
    """Full participation has no settings."""


class FullSampler(Sampler):
    """All clients."""

    name = "full"
    Config = FullConfig
    config: FullConfig

    @property
    def expected_cohort(self) -> float:
        """Mean number of clients in a round."""
        return float(len(self.clients))

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """All clients, `int64 [clients]`."""
        return self.clients
