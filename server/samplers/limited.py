# SPDX-License-Identifier: Apache-2.0
"""A cohort of fixed size among the clients with participations left. For users with personal
budgets: a user whose budget covers n uploads is sampled at most n times. The remaining
participations are found by drawing the earlier rounds again, so a cohort is a function of seed and
round. If fewer clients than the cohort size are left, all of them are sampled, and finally none.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from server.samplers.base import SizedSampler


class LimitedConfig(Config):
    """Settings of limited sampling."""

    cohort: int = Field(default=20, ge=1)
    """Clients per round, while enough clients are left."""
    participations: int = Field(default=30, ge=1)
    """How often a client may be sampled in the whole run."""


class Limited(SizedSampler):
    """Uniform sampling without replacement from those who may still be drawn."""

    name = "limited"
    Config = LimitedConfig
    config: LimitedConfig

    def __init__(self, config: LimitedConfig, clients: np.ndarray, seed: int) -> None:
        super().__init__(config, clients, seed)
        self._drawn: list[np.ndarray] = []
        self._counts = np.zeros(len(clients), dtype=np.int64)

    def sample(self, round_number: int) -> np.ndarray:
        """The cohort of a round: `int64 [clients]`, ascending, distinct; the same for the same seed
        and round, in any process. Earlier rounds that were not drawn yet are drawn first."""
        while len(self._drawn) < round_number:
            cohort = super().sample(len(self._drawn) + 1)
            self._counts[np.searchsorted(self.clients, cohort)] += 1
            self._drawn.append(cohort)
        return self._drawn[round_number - 1]

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw distinct clients, `int64 [clients]`."""
        left = self.clients[self._counts < self.config.participations]
        return random.choice(left, size=min(self.config.cohort, len(left)), replace=False)
