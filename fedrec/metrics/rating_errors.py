# SPDX-License-Identifier: Apache-2.0
"""Errors of predicted ratings, pooled over all rows (MetaMF, PNBM), which weights a user by the
number of held-out ratings."""

from __future__ import annotations

import numpy as np

from fedrec.metrics.base import RatingMetric
from fedrec.metrics.rated import RatedBlock


class MeanAbsoluteError(RatingMetric):
    """Mean absolute error."""

    name = "mae"

    def per_user(self, block: RatedBlock) -> np.ndarray:
        """Of each user's rows."""
        return block.means(np.abs(block.errors))

    def pooled(self, values: np.ndarray, rows: np.ndarray) -> float:
        """Of all rows."""
        return float(np.average(values, weights=rows))


class RootMeanSquaredError(RatingMetric):
    """Root of the mean squared error."""

    name = "rmse"

    def per_user(self, block: RatedBlock) -> np.ndarray:
        """Of each user's rows."""
        return np.sqrt(block.means(np.square(block.errors)))

    def pooled(self, values: np.ndarray, rows: np.ndarray) -> float:
        """Of all rows."""
        return float(np.sqrt(np.average(np.square(values), weights=rows)))
