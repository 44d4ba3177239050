# SPDX-License-Identifier: Apache-2.0
"""Item mean: every user's rating of an item is the mean of the training ratings of that item.

The simplest baseline of rating predictors. With `damping` k, k ratings equal to the overall mean
are added to each item.
"""

import numpy as np
from pydantic import Field

from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.config import Config


class ItemMeanConfig(Config):
    """Settings of the item mean."""

    damping: float = Field(default=0.0, ge=0)
    """Smoothing: number of ratings equal to the overall mean that are added to each item."""


class ItemMean(RatingBaseline):
    """Predicts an item's mean rating; an item without one gets the mean of all."""

    name = "item-mean"
    Config = ItemMeanConfig
    config: ItemMeanConfig

    def fit_ratings(self, ratings: Ratings) -> None:
        """Take the means."""
        mean = float(ratings.values.mean()) if len(ratings.values) else 0.0
        counts = np.bincount(ratings.items, minlength=ratings.num_items) + self.config.damping
        sums = (
            np.bincount(ratings.items, ratings.values, ratings.num_items)
            + self.config.damping * mean
        )
        self._means = np.divide(
            sums, counts, out=np.full(ratings.num_items, mean), where=counts > 0
        )

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`. The known ratings are not used."""
        return self._means[items]
