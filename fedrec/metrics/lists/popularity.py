# SPDX-License-Identifier: Apache-2.0
"""Mean popularity of the items in the lists."""

from __future__ import annotations

from torch import Tensor

from fedrec.metrics.block import RankedBlock
from fedrec.metrics.lists._popularity import PopularityMetric, of_lists


class ListPopularity(PopularityMetric):
    """Mean over users of the mean popularity of the items in the list, which is the share of
    training users who like an item."""

    name = "popularity"

    def of_users(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`, each in [0, 1]."""
        return of_lists(block, k)
