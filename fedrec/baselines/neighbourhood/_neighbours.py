# SPDX-License-Identifier: Apache-2.0
"""Shared code of neighbourhood predictors of ratings: settings, means, fallback and clipping."""

from abc import abstractmethod
from typing import Literal

import numpy as np
from pydantic import Field

from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.config import Config
from fedrec.neighbourhood.gradients import EVERY, predicted
from fedrec.neighbourhood.means import Scale
from fedrec.neighbourhood.profiles import Profiles, item_means
from fedrec.neighbourhood.similarity import Among, co_raters, nearest, shrunk


class ScaleConfig(Config):
    """Settings of predictors with a rating scale."""

    scale: Scale = (1.0, 5.0)
    """Lowest and highest rating; public."""

    def within(self, ratings: np.ndarray) -> np.ndarray:
        """Predictions `float64 [rows]`, clipped to the scale."""
        return np.clip(ratings, *self.scale)


class NeighboursConfig(ScaleConfig):
    """Settings of a predictor from similar items."""

    neighbours: int | None = Field(default=None, ge=1)
    """Number of neighbours N_k, the most similar items; default: all. PNBM has 900 on ML-100K and
    1,300 on ML-1M."""
    neighbours_of: Literal["catalogue", "user"] = "catalogue"
    """Candidates for neighbours: all items, or those that the user has rated, as in the library
    Surprise."""
    positive_only: bool = False
    """Whether negative similarities are set to 0."""
    shrinkage: float = Field(default=0.0, ge=0)
    """Similarities of items that n users rated are multiplied by n / (n + shrinkage)."""
    among: Among = "co-raters"
    """Users whose ratings enter norms (cosine) or means (Pearson): those who rated both items, or
    all."""


class Neighbours(RatingBaseline):
    """Item means plus deviations weighted by similarity (PNBM, equation 2); without rated
    neighbours the item's mean."""

    Config = NeighboursConfig
    config: NeighboursConfig

    @abstractmethod
    def similarity(self, profiles: Profiles) -> np.ndarray:
        """`float64 [items, items]`, zero on the diagonal."""

    def fit_ratings(self, ratings: Ratings) -> None:
        """Compute means and similarities."""
        config = self.config
        profiles = profiles_of(ratings)
        self._means, _ = item_means(profiles)
        found = self.similarity(profiles)
        if config.shrinkage:
            found = shrunk(found, co_raters(profiles), config.shrinkage)
        if config.positive_only:
            found = np.maximum(found, 0.0)
        self._similarity = (
            nearest(found, config.neighbours or EVERY)
            if config.neighbours_of == "catalogue"
            else found
        )

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`."""
        own = profiles_of(known)
        config = self.config
        limit = config.neighbours or EVERY if config.neighbours_of == "user" else EVERY
        found = predicted(self._similarity, own, self._means, users, items, limit=limit)
        return config.within(np.where(np.isnan(found), self._means[items], found))


def profiles_of(ratings: Ratings) -> Profiles:
    """Ratings grouped by user."""
    return Profiles.of(
        ratings.num_users, ratings.num_items, ratings.users, ratings.items, ratings.values
    )


def user_deviations(known: Profiles, means: np.ndarray, damping: float = 0.0) -> np.ndarray:
    """Mean over each user's ratings of the deviation from the item's mean, `float64 [users]`, with
    `damping` additional deviations of 0."""
    own = known.centred(means)
    sums = np.bincount(own.users, own.values, own.num_users)
    return sums / np.maximum(own.counts + damping, 1e-300)
