# SPDX-License-Identifier: Apache-2.0
"""All clients in turn: they are shuffled, divided into cohorts, and shuffled again."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.rng import stream
from server.samplers.base import Sampler


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    cohort: int = Field(default=20, ge=1)
    """Clients per round."""


class Example(Sampler):
    """Samples no client again before all clients were sampled (an incomplete last cohort is left
    out)."""

    Config = ExampleConfig
    config: ExampleConfig

    def __init__(self, config: ExampleConfig, clients: np.ndarray, seed: int) -> None:
        super().__init__(config, clients, seed)
        self.refuse_more_than_there_are(config.cohort)

    @property
    def expected_cohort(self) -> float:
        """Clients of a round, which audits need."""
        return float(self.config.cohort)

    def sample(self, round_number: int) -> np.ndarray:
        """The cohort of a round, ascending: a function of the seed and the round only."""
        turn, place = divmod(round_number - 1, len(self.clients) // self.config.cohort)
        order = stream(self.seed, "turn", turn).permutation(self.clients)
        return np.sort(order[place * self.config.cohort : (place + 1) * self.config.cohort])

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Not used, because `sample` is overridden."""
        raise NotImplementedError
