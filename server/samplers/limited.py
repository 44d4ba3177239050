# SPDX-License-Identifier: Apache-2.0
"""A cohort of fixed size among those who have not taken part as often as they may.

For users with budgets of their own: whose budget pays for n uploads is drawn n times and never
again. Who may still be drawn follows from the earlier rounds, which are drawn again to see; so a
cohort stays a function of seed and round. When fewer are left than a cohort holds, all of them are
drawn, and in the end nobody.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from server.samplers.base import Sampler


class LimitedConfig(Config):
    """Settings of limited sampling."""

    cohort: int = Field(default=20, ge=1)
    """Clients per round, while there are so many."""
    participations: int = Field(default=30, ge=1)
    """How often a client may be drawn in the whole run."""


class Limited(Sampler):
    """Uniform sampling without replacement from those who may still be drawn.

    Raises:
        ExperimentError: the cohort is larger than the number of clients.
    """

    Config = LimitedConfig
    config: LimitedConfig

    def __init__(self, config: LimitedConfig, clients: np.ndarray, seed: int) -> None:
        super().__init__(config, clients, seed)
        self.refuse_more_than_there_are(config.cohort)
        self._drawn: list[np.ndarray] = []
        self._counts = np.zeros(len(clients), dtype=np.int64)

    def sample(self, round_number: int) -> np.ndarray:
        """The cohort of a round: `int64`, ascending, distinct; the same for the same seed and
        round, in any process. Rounds before it that were not asked for are drawn now."""
        while len(self._drawn) < round_number:
            cohort = super().sample(len(self._drawn) + 1)
            self._counts[np.searchsorted(self.clients, cohort)] += 1
            self._drawn.append(cohort)
        return self._drawn[round_number - 1]

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw distinct clients."""
        left = self.clients[self._counts < self.config.participations]
        return random.choice(left, size=min(self.config.cohort, len(left)), replace=False)
