# SPDX-License-Identifier: Apache-2.0
"""Replaces a share of each user's rows by random items: the baseline for generators of synthetic
rows."""

import dataclasses

import numpy as np

from fedrec.data.own_numbers import row_numbers
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.perturb.synthesis.preferences import (
    ReplacementConfig,
    preferences_of,
    refuse_missing_rows,
)
from fedrec.perturb.synthesis.selection import lowest, replaced_counts
from fedrec.perturb.synthesis.substitutes import random_substitutes


class RandomReplacementConfig(ReplacementConfig):
    """Settings of random replacement: a ratio for all users, or a table of users."""


class RandomReplacement(Perturbation):
    """Random rows of each user get uniformly random items that the user does not have."""

    name = "random-replacement"
    Config = RandomReplacementConfig
    config: RandomReplacementConfig

    def depends_on(self, rated: bool) -> str:
        """Nothing: each user's rows and items have random numbers of its own."""
        return ""

    def perturb(self, data: TrainingData) -> Perturbed:
        """Replace k n rows of each user; a row keeps its user, rating and time.

        Raises:
            DataError: a user has no training row, or too few other items, or the table of users is
                wrong.
        """
        refuse_missing_rows(data)
        preferences = preferences_of(self.config, data.rows)
        score = row_numbers(data.rows, self.seed, "perturb-rows")
        chosen = lowest(data.rows, score, replaced_counts(data.rows, preferences.ratio))
        items = data.rows.items.copy()
        items[chosen] = random_substitutes(data.rows, chosen, self.seed)
        figures = {"replaced rows": len(chosen)}
        return Perturbed(
            dataclasses.replace(data.rows, items=items), np.arange(len(items)), figures
        )

    def words(self) -> list[str]:
        """No guarantee."""
        return [
            f"Random replacement of {_share(self.config)} rows: the others are published as they"
            " are, and no epsilon covers a profile. What is left of the profiles tells most of the"
            " users apart: see `fedrec synthesise`."
        ]


def _share(config: ReplacementConfig) -> str:
    return (
        f"{config.replacement_ratio:.0%} of each user's"
        if config.users is None
        else "each user's own share of"
    )
