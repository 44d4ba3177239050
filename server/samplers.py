# SPDX-License-Identifier: Apache-2.0
"""Samplers of cohorts: full, of fixed size, Poisson, limited by budgets, and with a smallest
separation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.rng import stream

# The contract of a cohort sampler: a function of the seed and the round.


class Sampler(ABC):
    """Base of samplers, which draw the cohort of each round.

    A built-in has a `name` and lives in `server/samplers.py`, its configuration class above it.

    Args:
        config: its settings.
        clients: `int64 [clients]`, ascending: the clients that may be drawn.
        seed: the experiment's seed.
    """

    Config: ClassVar[type[Config]] = Config

    def __init__(self, config: Config, clients: np.ndarray, seed: int) -> None:
        self.config = config
        self.clients = clients
        self.seed = seed

    def sample(self, round_number: int) -> np.ndarray:
        """Cohort of a round, `int64 [clients]`, ascending, distinct; the same for the same seed
        and round, in any process."""
        return np.sort(self.draw(stream(self.seed, "cohort", round_number)))

    @property
    def schedule(self) -> Scheduled | None:
        """Bound on each client's participation, independent of data, for privacy mechanisms that
        need it; None: no bound."""
        return None

    @abstractmethod
    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw distinct clients, `int64 [clients]`, in any order."""


class _SizedSampler(Sampler):
    """Base of samplers with a setting `cohort`, the (mean) number of clients in a round.

    Raises:
        ExperimentError: the cohort is larger than the number of clients.
    """

    config: Any

    def __init__(self, config: Config, clients: np.ndarray, seed: int) -> None:
        super().__init__(config, clients, seed)
        if self.config.cohort > len(clients):
            raise ExperimentError(
                "wrong value for 'sampler.cohort'",
                expected=f"at most the number of training clients, {len(clients)}",
                got=f"{self.config.cohort:g}",
                fix=f"set sampler.cohort = {len(clients)} or less",
            )


# Every client in every round.
#
# Under differential privacy there is no amplification by sampling, and the cohort need not be
# secret. A few rounds with all clients need less noise for the same epsilon than many rounds with a
# sample.


class FullSampler(Sampler):
    """Sampler of all clients in every round."""

    name = "full"

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Return all clients, `int64 [clients]`."""
        return self.clients


# A cohort of fixed size, drawn uniformly without replacement (PrivRec algorithm 1, line 3).


class FixedSizeConfig(Config):
    """Settings of fixed-size sampling."""

    cohort: int = Field(default=20, ge=1)
    """Clients per round (M in PrivRec); with `limited`, while enough clients are left."""


class FixedSizeSampler(_SizedSampler):
    """Uniform sampling without replacement."""

    name = "fixed-size"
    Config = FixedSizeConfig
    paper = "PrivRec (Wang et al. 2021), algorithm 1"
    config: FixedSizeConfig

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw distinct clients, `int64 [cohort]`."""
        return random.choice(self.clients, size=self.config.cohort, replace=False)


# A Poisson cohort: every client takes part independently with the same probability.
#
# The size of the cohort varies, and it may be empty. This is the sampling that amplification bounds
# for add/remove adjacency assume.


class PoissonConfig(Config):
    """Settings of Poisson sampling."""

    cohort: float = Field(default=20.0, gt=0)
    """Expected number of clients per round."""


class PoissonSampler(_SizedSampler):
    """Independent sampling with probability cohort / clients."""

    name = "poisson"
    Config = PoissonConfig
    config: PoissonConfig

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw distinct clients, `int64 [clients]`."""
        probability = self.config.cohort / len(self.clients)
        return self.clients[random.random(len(self.clients)) < probability]


# A cohort of fixed size among the clients with participations left. For users with personal
# budgets: a user whose budget covers n uploads is sampled at most n times. The remaining
# participations are found by drawing the earlier rounds again, so a cohort is a function of seed
# and round. If fewer clients than the cohort size are left, all of them are sampled, and finally
# none.


class LimitedConfig(FixedSizeConfig):
    """Settings of limited sampling; the cohort is smaller once fewer clients are left."""

    participations: int = Field(default=30, ge=1)
    """How often a client may be sampled in the whole run."""


class Limited(_SizedSampler):
    """Uniform sampling without replacement from those who may still be drawn."""

    name = "limited"
    Config = LimitedConfig
    config: LimitedConfig

    def __init__(self, config: LimitedConfig, clients: np.ndarray, seed: int) -> None:
        super().__init__(config, clients, seed)
        self._drawn: list[np.ndarray] = []
        self._counts = np.zeros(len(clients), dtype=np.int64)

    def sample(self, round_number: int) -> np.ndarray:
        """Cohort of a round, `int64 [clients]`, ascending, distinct; the same for the same seed
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


# Cohorts with a smallest distance between two rounds of a client, for privacy mechanisms whose
# noise is correlated.
#
# The clients are divided into as many groups, and each round draws from the group whose turn it is.
# A client's group is a function of the seed and its own id alone: consecutive ids are dealt out to
# the groups in random order. So groups have nearly equal size, and clients that join change
# nobody's group; a resumed run has the same cohorts.
#
# Cohorts may be known: there is no amplification by sampling.


class MinSeparationConfig(FixedSizeConfig):
    """Settings of cohorts with a smallest separation."""

    separation: int = Field(default=16, ge=1)
    """Number of groups, and smallest distance, in rounds, between two rounds of a client."""


class MinSeparation(_SizedSampler):
    """Sampler that draws each round's cohort from the group whose turn it is.

    Raises:
        ExperimentError: a group has fewer clients than a cohort.
    """

    name = "min-separation"
    Config = MinSeparationConfig
    paper = "(Amplified) Banded Matrix Factorization (Choquette-Choo et al. 2023)"
    config: MinSeparationConfig

    def __init__(self, config: MinSeparationConfig, clients: np.ndarray, seed: int) -> None:
        super().__init__(config, clients, seed)
        self._groups = _dealt(clients, config.separation, seed)
        self._turn = clients[:0]
        sizes = np.bincount(self._groups, minlength=config.separation)
        needed = config.cohort * config.separation
        if len(clients) < needed or sizes.min() < config.cohort:
            raise ExperimentError(
                "too few clients for the separation of their rounds",
                expected=f"{config.cohort} x {config.separation} = {needed} clients or more, and"
                f" {config.cohort} in each group",
                got=f"{len(clients)}, in groups of {sizes.min()} to {sizes.max()}",
                fix=f"set sampler.cohort = {max(1, sizes.min())} or a smaller sampler.separation",
            )

    @property
    def schedule(self) -> Scheduled:
        """Bound on participation: groups are independent of data, and take turns."""
        return Scheduled(self.config.cohort, self.config.separation, joining=True)

    def sample(self, round_number: int) -> np.ndarray:
        """Cohort of a round, `int64 [clients]`, ascending, distinct; a function of seed and
        round."""
        turn = (round_number - 1) % self.config.separation
        self._turn = self.clients[self._groups == turn]
        return super().sample(round_number)

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw clients of the current group, `int64 [clients]`."""
        return random.choice(self._turn, size=self.config.cohort, replace=False)


def _dealt(clients: np.ndarray, groups: int, seed: int) -> np.ndarray:
    """Group of each client, `int64 [clients]`."""
    blocks, ranks = np.divmod(clients, groups)
    distinct, block_of = np.unique(blocks, return_inverse=True)
    orders = [stream(seed, "min-separation", int(b)).permutation(groups) for b in distinct]
    return np.array(orders)[block_of, ranks]
