# SPDX-License-Identifier: Apache-2.0
"""k-ary randomised response over the catalogue, row by row (Warner 1965; Kairouz et al. 2016)."""

import dataclasses

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.perturb.targeted.mechanisms import Interaction, keep_probability, randomised_response
from fedrec.rng import stream


class RandomisedResponseConfig(Config):
    """Settings of randomised response."""

    epsilon: float = Field(gt=0)
    """Epsilon of one row, > 0; a profile of n rows has n times this epsilon."""


class RandomisedResponse(Perturbation):
    """Each row keeps its item with probability e^eps / (e^eps + M - 1), or gets any other item of
    the catalogue's M."""

    Config = RandomisedResponseConfig
    paper = "Warner 1965; Kairouz et al. 2016"
    config: RandomisedResponseConfig

    def perturb(self, data: TrainingData) -> Perturbed:
        """Randomise every row; it keeps its user and time. Where ratings are learned from, its
        rating is drawn too."""
        rows = data.rows
        scale = None
        codes = None
        if data.rated and rows.ratings is not None:
            scale, codes = np.unique(rows.ratings, return_inverse=True)
        items = rows.items.copy()
        ratings = None if rows.ratings is None else rows.ratings.copy()
        sizes = {"num_items": rows.num_items, "num_values": 1 if scale is None else len(scale)}
        for user in np.flatnonzero(np.diff(rows.user_offsets)).tolist():
            own = rows.rows_of(user)
            real = Interaction(rows.items[own], None if codes is None else codes[own])
            random = stream(self.seed, "perturb", user)
            new = randomised_response(real, epsilon=self.config.epsilon, random=random, **sizes)
            items[own] = new.items
            if ratings is not None and scale is not None and new.values is not None:
                ratings[own] = scale[new.values]
        kept = keep_probability(self.config.epsilon, rows.num_items * sizes["num_values"])
        figures = {
            "chance that a row stays": kept,
            "replaced rows": int((items != rows.items).sum()),
        }
        return Perturbed(
            dataclasses.replace(rows, items=items, ratings=ratings), np.arange(len(rows)), figures
        )

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
