# SPDX-License-Identifier: Apache-2.0
"""Popularity of the items in each list."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedrec.metrics.base import ListMetric
from fedrec.metrics.block import RankedBlock


class PopularityMetric(ListMetric):
    """A mean over users, as a sum and the number of users in it."""

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

    @abstractmethod
    def of_users(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`; NaN for a user without a value."""


def popularity_of(block: RankedBlock) -> Tensor:
    """`float64 [items]`: the share of training users who like each item.

    Raises:
        ValueError: the block was made without it.
    """
    if block.popularity is None:
        raise ValueError("Expected the popularity of the items, got none.")
    return block.popularity


def liked_of(block: RankedBlock) -> Tensor:
    """`bool [users, items]`: the known items that each user likes.

    Raises:
        ValueError: the block was made without them.
    """
    if block.liked is None:
        raise ValueError("Expected the items that users like, got none.")
    return block.liked


def of_lists(block: RankedBlock, k: int) -> Tensor:
    """`float64 [users]`: mean popularity of the items in each list of length k; NaN for an empty
    list."""
    shares = popularity_of(block)[block.lists] * block.listed
    return shares[:, :k].sum(1) / block.listed[:, :k].sum(1)
