# SPDX-License-Identifier: Apache-2.0
"""Cohorts with a smallest distance between two rounds of a client, for privacy mechanisms whose
noise is correlated.

The clients are divided into as many groups, and each round draws from the group whose turn it is. A
client's group is a function of the seed and its own id alone: consecutive ids are dealt out to the
groups in random order. So groups have nearly equal size, and clients that join change nobody's
group; a resumed run has the same cohorts.

`draw = "fixed-size"` is for cohorts that may be known. With `"poisson"`, the clients of a group
take part independently; if these coin flips are secret (`privacy.mode = "secure"`), privacy is
amplified under add-remove adjacency (Choquette-Choo et al. 2023).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.rng import stream
from server.samplers.base import SizedSampler


class MinSeparationConfig(Config):
    """Settings of cohorts with a smallest separation."""

    cohort: int = Field(default=20, ge=1)
    """Clients per round; their mean number with `draw = "poisson"`."""
    separation: int = Field(default=16, ge=1)
    """Number of groups, and smallest distance, in rounds, between two rounds of a client."""
    draw: Literal["fixed-size", "poisson"] = "fixed-size"
    """How a cohort is drawn from the group whose turn it is; `poisson`: independent coin flips."""


class MinSeparation(SizedSampler):
    """Draws each round's cohort from the group whose turn it is.

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
        poisson = config.draw == "poisson"
        if len(clients) < needed or (sizes.min() < config.cohort and not poisson):
            raise ExperimentError(
                "too few clients for the separation of their rounds",
                expected=f"{config.cohort} x {config.separation} = {needed} clients or more, and"
                f" {config.cohort} in each group",
                got=f"{len(clients)}, in groups of {sizes.min()} to {sizes.max()}",
                fix=f"set sampler.cohort = {max(1, sizes.min())} or a smaller sampler.separation",
            )

    @property
    def schedule(self) -> Scheduled:
        """Groups do not depend on data, and return after all others."""
        rate = self._rate if self.config.draw == "poisson" else 1.0
        own = self.config.cohort, self.config.separation
        return Scheduled(*own, rate=rate, joining=rate == 1)

    def eligible(self, round_number: int) -> np.ndarray:
        """The group whose turn it is, `int64 [clients]`, ascending."""
        return self.clients[self._groups == (round_number - 1) % self.config.separation]

    def sample(self, round_number: int) -> np.ndarray:
        """The cohort of a round: `int64 [clients]`, ascending, distinct; a function of seed and
        round."""
        self._turn = self.eligible(round_number)
        return super().sample(round_number)

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Some clients of the present group, `int64 [clients]`."""
        if self.config.draw == "poisson":
            return self._turn[random.random(len(self._turn)) < self._rate]
        return random.choice(self._turn, size=self.config.cohort, replace=False)

    @property
    def _rate(self) -> float:
        """Probability that a client takes part in a round of its group."""
        return self.config.cohort * self.config.separation / len(self.clients)


def _dealt(clients: np.ndarray, groups: int, seed: int) -> np.ndarray:
    """The group of each client, `int64 [clients]`."""
    blocks, places = np.divmod(clients, groups)
    distinct, own = np.unique(blocks, return_inverse=True)
    orders = [stream(seed, "min-separation", int(b)).permutation(groups) for b in distinct]
    return np.array(orders)[own, places]
