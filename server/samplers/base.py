# SPDX-License-Identifier: Apache-2.0
"""The contract of a cohort sampler: a function of the seed and the round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.rng import stream


class Sampler(ABC):
    """Draws the cohort of a round.

    A built-in has a `name` and lives in `server/samplers/`, its configuration class above it.

    Args:
        config: its settings.
        clients: `int64 [clients]`, ascending: the clients that may be drawn.
        seed: the experiment's seed.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""

    def __init__(self, config: Config, clients: np.ndarray, seed: int) -> None:
        self.config = config
        self.clients = clients
        self.seed = seed

    def sample(self, round_number: int) -> np.ndarray:
        """The cohort of a round: `int64 [clients]`, ascending, distinct; the same for the same seed
        and round, in any process."""
        return np.sort(self.draw(stream(self.seed, "cohort", round_number)))

    def eligible(self, round_number: int) -> np.ndarray:
        """The clients that may be drawn in a round, `int64 [clients]`, ascending."""
        return self.clients

    @property
    def expected_cohort(self) -> float | None:
        """Mean number of clients in a round, the same in every round; None where it is not known.
        Audits need it."""
        return None

    @property
    def schedule(self) -> Scheduled | None:
        """What it guarantees of the rounds of each client, whatever their data, for privacy
        mechanisms that need it; None: nothing."""
        return None

    def refuse_more_than_there_are(self, cohort: float) -> None:
        """Raise an `ExperimentError` when a (mean) cohort is larger than the number of clients."""
        if cohort > len(self.clients):
            raise ExperimentError(
                "wrong value for 'sampler.cohort'",
                expected=f"at most the number of training clients, {len(self.clients)}",
                got=f"{cohort:g}",
                fix=f"set sampler.cohort = {len(self.clients)} or less",
            )

    @abstractmethod
    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw distinct clients, `int64 [clients]`, in any order."""


class SizedSampler(Sampler):
    """Base of samplers with a setting `cohort`, the (mean) number of clients in a round.

    Raises:
        ExperimentError: it is larger than the number of clients.
    """

    config: Any

    def __init__(self, config: Config, clients: np.ndarray, seed: int) -> None:
        super().__init__(config, clients, seed)
        self.refuse_more_than_there_are(self.config.cohort)

    @property
    def expected_cohort(self) -> float:
        """The setting; of clients with a limit, as long as so many are left."""
        return float(self.config.cohort)
