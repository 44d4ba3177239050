# SPDX-License-Identifier: Apache-2.0
"""Popularity: every user gets the items that most training users like. The simplest baseline of
recommenders."""

import numpy as np
import torch

from fedrec.baselines.base import Baseline, Histories
from fedrec.config import Config


def item_counts(histories: Histories) -> torch.Tensor:
    """`float32 [items]`: how often each item occurs in the histories, repeats included."""
    return torch.from_numpy(
        np.bincount(histories.items, minlength=histories.num_items).astype(np.float32)
    )


class PopularityConfig(Config):
    """Popularity has no settings."""


class Popularity(Baseline):
    """Scores an item by its number of positive interactions."""

    name = "popularity"
    Config = PopularityConfig

    def fit(self, histories: Histories) -> None:
        """Count the positives of the training users."""
        self._counts = item_counts(histories)

    def scores(self, histories: Histories) -> torch.Tensor:
        """The same counts for every user, as `float32 [users, items]` (a view; do not write to
        it)."""
        return self._counts.expand(histories.num_users, -1)
