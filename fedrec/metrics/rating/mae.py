# SPDX-License-Identifier: Apache-2.0
"""Mean absolute error of predicted ratings. Pooled over all rows (MetaMF, PNBM), which weights a
user by the number of held-out ratings."""

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
