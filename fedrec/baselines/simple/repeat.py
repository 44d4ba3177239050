# SPDX-License-Identifier: Apache-2.0
"""Repeat: the user's own items first, by count, then the most popular items.

On data where the same pair occurs again and again (Frappe: five rows per pair), a row-level
evaluation mostly measures whether a system recommends what the user already uses. This baseline
does nothing else, and should be reported with every such result. On data without repeats it equals
popularity.
"""

import numpy as np
import torch

from fedrec.baselines.base import Baseline, Histories
from fedrec.baselines.simple.popularity import item_counts
from fedrec.config import Config


class RepeatConfig(Config):
    """Repeat has no settings."""


class RepeatBaseline(Baseline):
    """Scores an item by the user's own count, equal counts by popularity."""

    name = "repeat"
    Config = RepeatConfig

    def fit(self, histories: Histories) -> None:
        """Learn the popularity, scaled into [0, 1) so that it only decides between equal counts."""
        counts = item_counts(histories)
        self._popularity = counts / (counts.max() + 1)

    def scores(self, histories: Histories) -> torch.Tensor:
        """Own count plus scaled popularity, `float32 [users, items]`."""
        place = histories.rows() * histories.num_items + histories.items
        counts = np.bincount(place, minlength=histories.num_users * histories.num_items)
        own = torch.from_numpy(counts.astype(np.float32)).view(
            histories.num_users, histories.num_items
        )
        return own + self._popularity
