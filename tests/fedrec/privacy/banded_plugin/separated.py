# SPDX-License-Identifier: Apache-2.0
"""Cohorts with a smallest distance between two rounds of a client: the clients are divided at
random into as many groups, and each round draws from the next one."""

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.rng import stream
from server.samplers.base import Sampler


class SeparatedConfig(Config):
    """Settings of separated cohorts."""

    cohort: int = Field(default=3, ge=1)
    """Clients per round."""
    separation: int = Field(default=4, ge=1)
    """Number of groups, and smallest distance between two rounds of a client."""


class Separated(Sampler):
    """Draws each round's cohort from the group whose turn it is.

    Raises:
        ExperimentError: a group has fewer clients than a cohort.
    """

    Config = SeparatedConfig
    config: SeparatedConfig

    def __init__(self, config: SeparatedConfig, clients: np.ndarray, seed: int) -> None:
        super().__init__(config, clients, seed)
        self.refuse_more_than_there_are(config.cohort)
        shuffled = stream(seed, "separated-groups").permutation(clients)
        self._groups = np.array_split(shuffled, config.separation)
        self._turn = self._groups[0]
        if len(self._groups[-1]) < config.cohort:
            raise ExperimentError(
                "wrong value for 'sampler.separation'",
                expected=f"at most {len(clients) // config.cohort} groups of {config.cohort}",
                got=str(config.separation),
                fix="set fewer groups or a smaller cohort",
            )

    @property
    def schedule(self) -> Scheduled:
        """Groups do not depend on data, and return after all others."""
        return Scheduled(self.config.cohort, self.config.separation)

    def sample(self, round_number: int) -> np.ndarray:
        """The cohort of a round: `int64 [clients]`, ascending, distinct."""
        self._turn = self._groups[(round_number - 1) % self.config.separation]
        return super().sample(round_number)

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Some clients of the present group, `int64 [clients]`."""
        return random.choice(self._turn, size=self.config.cohort, replace=False)
