# SPDX-License-Identifier: Apache-2.0
"""Row-by-row perturbations: randomised response and random replacement."""

import dataclasses
import math

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.data.client_data import row_numbers
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.perturb.substitutes import random_substitutes
from fedrec.perturb.targeted import RATING_SCALE, RandomisedRows, keep_probability
from fedrec.perturb.upc_sdg import ReplacementConfig, check_rows, lowest, replaced_counts
from fedrec.rng import stream

# k-ary randomised response over the catalogue, row by row (Warner 1965; Kairouz et al. 2016).


def randomised_response(
    codes: np.ndarray,
    *,
    num_items: int,
    num_values: int,
    epsilon: float,
    random: np.random.Generator,
) -> np.ndarray:
    """Apply randomised response over all `num_items x num_values` interactions (Warner 1965;
    Kairouz et al. 2016).

    Each stays unchanged with probability `e^eps / (e^eps + outcomes - 1)` and otherwise becomes any
    other interaction, including those of the client: exactly epsilon-DP for each interaction.

    Args:
        codes: `int64 [k]`, the protected interactions, see `RandomisedRows`.
        num_items: size of the catalogue.
        num_values: number of rating values.
        epsilon: of one interaction, > 0.
        random: source of randomness.
    """
    outcomes = num_items * num_values
    if outcomes == 1:
        return codes
    fakes = (codes + random.integers(1, outcomes, size=len(codes))) % outcomes
    return np.where(random.random(len(codes)) < keep_probability(epsilon, outcomes), codes, fakes)


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
        """Describe the dependence: if ratings are drawn too, on the rating scale."""
        return RATING_SCALE if rated else ""

    def perturb(self, data: TrainingData) -> Perturbed:
        """Randomise every row; it keeps its user and time. If ratings are used in training, its
        rating is drawn too."""
        rows = data.rows
        randomised = RandomisedRows(data)
        epsilon = self.config.epsilon
        outcomes = math.prod(randomised.sizes.values())
        for user in np.flatnonzero(np.diff(rows.user_offsets)).tolist():
            profile = rows.rows_of(user)
            random = stream(self.seed, "perturb", user)
            codes = randomised_response(
                randomised.codes(profile), epsilon=epsilon, random=random, **randomised.sizes
            )
            randomised.write(profile, codes)
        figures = {
            "chance that a row stays": keep_probability(epsilon, outcomes),
            "replaced rows": int((randomised.items != rows.items).sum()),
        }
        return Perturbed(randomised.table(), np.arange(len(rows)), figures)

    def words(self) -> list[str]:
        """Describe the guarantee of a row, and its sum over rows."""
        return [
            (
                f"Randomised response with epsilon {self.config.epsilon:g} for each row, delta 0,"
                f" on the device; a profile of n rows has {self.config.epsilon:g} n, and how many"
                " rows a user has is published."
            ),
            "Random numbers come from the experiment's seed: a simulation, not a release.",
        ]


# Replacement of a share of each user's rows by random items: a baseline for synthetic data.


class RandomReplacement(Perturbation):
    """Replaces random rows of each user by uniformly random items that the user does not have."""

    name = "random-replacement"
    Config = ReplacementConfig
    config: ReplacementConfig

    def depends_on(self, rated: bool) -> str:
        """Return no dependence: random numbers are drawn for each user separately."""
        return ""

    def perturb(self, data: TrainingData) -> Perturbed:
        """Replace k n rows of each user; a row keeps its user, rating and time.

        Raises:
            DataError: a user has no training row, or too few other items.
        """
        check_rows(data)
        score = row_numbers(data.rows, self.seed, "perturb-rows")
        chosen = lowest(data.rows, score, replaced_counts(data.rows, self.config.replacement_ratio))
        items = data.rows.items.copy()
        items[chosen] = random_substitutes(data.rows, chosen, self.seed)
        figures = {"replaced rows": len(chosen)}
        return Perturbed(
            dataclasses.replace(data.rows, items=items), np.arange(len(items)), figures
        )

    def words(self) -> list[str]:
        """State that there is no guarantee."""
        return [
            f"Random replacement of {self.config.replacement_ratio:.0%} of each user's rows: the"
            " others are published unchanged, and no epsilon covers a profile. The unchanged rows"
            " identify most users: see `fedrec synthesise`."
        ]
