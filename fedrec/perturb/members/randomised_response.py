# SPDX-License-Identifier: Apache-2.0
"""k-ary randomised response over the catalogue, row by row (Warner 1965; Kairouz et al. 2016)."""

import math

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.perturb.targeted.mechanisms import (
    RATING_SCALE,
    RandomisedRows,
    keep_probability,
    randomised_response,
)
from fedrec.rng import stream


class RandomisedResponseConfig(Config):
    """Settings of randomised response."""

    epsilon: float = Field(gt=0)
    """Epsilon of one row, > 0; a profile of n rows has n times this epsilon."""


class RandomisedResponse(Perturbation):
    """Each row keeps its item with probability e^eps / (e^eps + M - 1), or gets any other item of
    the catalogue's M."""

    name = "randomised-response"
    Config = RandomisedResponseConfig
    paper = "Warner 1965; Kairouz et al. 2016"
    config: RandomisedResponseConfig

    def depends_on(self, rated: bool) -> str:
        """Where ratings are drawn too, the rating scale."""
        return RATING_SCALE if rated else ""

    def perturb(self, data: TrainingData) -> Perturbed:
        """Randomise every row; it keeps its user and time. Where ratings are learned from, its
        rating is drawn too."""
        rows = data.rows
        found = RandomisedRows(data)
        epsilon = self.config.epsilon
        for user in np.flatnonzero(np.diff(rows.user_offsets)).tolist():
            own = rows.rows_of(user)
            random = stream(self.seed, "perturb", user)
            real = found.real(own)
            new = randomised_response(real, epsilon=epsilon, random=random, **found.sizes)
            found.write(own, new)
        figures = {
            "chance that a row stays": keep_probability(epsilon, math.prod(found.sizes.values())),
            "replaced rows": int((found.items != rows.items).sum()),
        }
        return Perturbed(found.table(), np.arange(len(rows)), figures)

    def words(self) -> list[str]:
        """What is guaranteed: a row, and how rows add up."""
        return [
            (
                f"Randomised response with epsilon {self.config.epsilon:g} for each row, delta 0,"
                f" on the device; a profile of n rows has {self.config.epsilon:g} n, and how many"
                " rows a user has is published."
            ),
            "Random numbers come from the experiment's seed: a simulation, not a release.",
        ]
