# SPDX-License-Identifier: Apache-2.0
"""Metrics of the popularity of the items in each list."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedrec.metrics.base import ListMetric
from fedrec.metrics.block import RankedBlock
from fedrec.metrics.long_rows import pairs


class ListPopularity(ListMetric):
    """Mean over users of the mean popularity of the items in the list, which is the share of
    training users who like an item."""

    name = "popularity"
    lower_is_better = True

    def sums(self, block: RankedBlock, k: int) -> Mapping[str, Tensor]:
        """`float64 [2]`: sum over the users with a value, and their number."""
        values = self.of_users(block, k)
        known = ~values.isnan()
        return {self.name: torch.stack([values[known].sum(), known.sum().double()])}

    def value(self, sums: Mapping[str, np.ndarray]) -> float:
        """The mean; NaN without users."""
        total, users = sums[self.name].tolist()
        return total / users if users else float("nan")

    def of_users(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`, each in [0, 1]; NaN for an empty list."""
        shares = block.given("popularity")[block.lists] * block.listed
        return shares[:, :k].sum(1) / block.listed[:, :k].sum(1)


class PopularityLift(ListPopularity):
    """Mean popularity of the items in the list over that of the user's known liked items, minus 1;
    mean over the users who have such items."""

    name = "popularity-lift"
    range = (-1.0, float("inf"))
    paper = "Abdollahpouri, Mansoury, Burke and Mobasher 2019"

    def of_users(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`; NaN for a user without known liked items that others like too."""
        users, items = pairs(block.given("liked"))
        sums = block.sum_by_user(block.given("popularity")[items], users)
        usual = sums / users.bincount(minlength=len(sums))
        return super().of_users(block, k) / torch.where(usual > 0, usual, torch.nan) - 1
