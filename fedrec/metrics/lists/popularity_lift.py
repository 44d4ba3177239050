# SPDX-License-Identifier: Apache-2.0
"""How much more popular the items in a list are than those that its user likes."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.metrics.block import RankedBlock
from fedrec.metrics.lists._popularity import (
    PopularityMetric,
    liked_of,
    of_lists,
    popularity_of,
)


class PopularityLift(PopularityMetric):
    """Mean popularity of the items in the list over that of the user's known liked items, minus 1;
    mean over the users who have such items."""

    name = "popularity-lift"
    range = (-1.0, float("inf"))
    paper = "Abdollahpouri, Mansoury, Burke and Mobasher 2019"

    def of_users(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`; NaN for a user without known liked items that others like too."""
        liked = liked_of(block)
        usual = liked.double() @ popularity_of(block) / liked.sum(1)
        return of_lists(block, k) / torch.where(usual > 0, usual, torch.nan) - 1
