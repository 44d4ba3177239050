# SPDX-License-Identifier: Apache-2.0
"""Probabilistic neighbourhood model: similarities that are learned from ratings (PNBM, equations 1
to 4).

    minimise  1/2 sum_ui (r_ui - f_ui)^2 + lambda/2 sum_ij s_ij^2,    f_ui as in equation 2

by stochastic gradient descent on similarities S `[items, items]`, row i being those of item i. S is
not symmetric.

Where this differs from the paper:

- Equations 3 and 6 print the norm of S instead of its square, and equation 4 sums over (u, j)
  terms indexed (u, i).
- Equation 5 leaves out the sign of s_ij. It is here (`fedrec.neighbourhood.learned`).
- f does not change when S is scaled, so the penalty only makes S shrink and steps grow; early
  stopping regularises instead. `prior` makes the scale meaningful.
- The initial similarities, the batches and the choice of neighbours are not in the paper; they are
  settings.
"""

from abc import abstractmethod

import numpy as np
from pydantic import Field

from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.baselines.neighbours import ScaleConfig, profiles_of
from fedrec.errors import ExperimentError
from fedrec.neighbourhood.learned import Bounds, Examples, Start, initial_similarity, predicted
from fedrec.neighbourhood.similarity import Profiles, item_means, nearest
from fedrec.rng import stream


class SimilarityConfig(ScaleConfig):
    """Settings of systems that learn similarities."""

    start: Start = "constant"
    """Initial similarities; `constant` and `uniform` do not depend on the ratings, `cosine` and
    `pearson` are computed from them."""
    regularisation: float = Field(default=0.005, ge=0)
    """Regularisation lambda, in every step."""
    neighbours: int | None = Field(default=None, ge=1)
    """Number of neighbours N_k with the largest similarity in a prediction; default: all. The paper
    has 500."""
    prior: float = Field(default=0.0, ge=0)
    """Constant added to the denominators of equation 2; 0 in the paper."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial similarities, the order of ratings and the noise."""


class LearnedSimilarities(RatingBaseline):
    """Rating prediction from similarities that a subclass learns.

    Attributes:
        similarity: `float64 [items, items]`, after fitting.
    """

    config: SimilarityConfig
    similarity: np.ndarray

    def selected(self, profiles: Profiles, random: np.random.Generator) -> Profiles:
        """Select the ratings to learn from; all by default."""
        return profiles

    @abstractmethod
    def learned(
        self, start: np.ndarray, profiles: Profiles, random: np.random.Generator
    ) -> np.ndarray:
        """Learn the similarities `float64 [items, items]`.

        Args:
            start: initial ones, `float64 [items, items]`; may be changed.
            profiles: the ratings to learn from.
            random: source of randomness.
        """

    def fit_ratings(self, ratings: Ratings) -> None:
        """Learn the similarities.

        Raises:
            ExperimentError: there are no ratings to learn from, or training diverged.
        """
        random = stream(self.config.seed, f"baseline-{self.name}")
        profiles = self.selected(profiles_of(ratings), random)
        self._means = item_means(profiles)
        start = initial_similarity(self.config.start, profiles, random)
        self.similarity = self.learned(start, profiles, random)
        check_divergence(self.similarity)

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`; the item's mean without neighbours."""
        config = self.config
        similarity = nearest(self.similarity, config.neighbours)
        known_ratings = profiles_of(known)
        return config.clipped(
            predicted(similarity, known_ratings, self._means, users, items, prior=config.prior)
        )


class CentralPnbmConfig(SimilarityConfig):
    """Settings of the probabilistic neighbourhood model."""

    epochs: int = Field(default=20, ge=0)
    """Epochs over the ratings."""
    batch: int | None = Field(default=1000, ge=1)
    """Ratings per step; default 1000, null: all."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Step size eta, on the sum over a batch."""


class CentralPnbm(LearnedSimilarities):
    """Neighbourhood model with learned similarities."""

    name = "pnbm"
    Config = CentralPnbmConfig
    paper = "PNBM, equations 1-4"
    config: CentralPnbmConfig

    def learned(
        self, start: np.ndarray, profiles: Profiles, random: np.random.Generator
    ) -> np.ndarray:
        """Minimise the loss by gradient descent."""
        config = self.config
        similarity = start
        examples = Examples(profiles, self._means)
        size = config.batch or len(examples)
        for _ in range(config.epochs):
            order = random.permutation(len(examples))
            for first in range(0, len(order), size):
                batch = order[first : first + size]
                gradient, _ = examples.gradient(similarity, batch, Bounds(prior=config.prior))
                descend(similarity, gradient, config.learning_rate, config.regularisation)
        return similarity


def descend(
    similarity: np.ndarray, gradient: np.ndarray, rate: float, regularisation: float
) -> None:
    """Take one step on similarities `[items, items]` (equation 4); changes both arrays in place."""
    similarity *= 1 - rate * regularisation
    gradient *= rate
    similarity -= gradient


def check_divergence(parameters: np.ndarray) -> None:
    """Check that parameters `[...]` are finite.

    Raises:
        ExperimentError: they are not.
    """
    if not np.isfinite(parameters).all():
        raise ExperimentError(
            "training diverged: parameters are NaN or infinite", fix="lower learning-rate"
        )
