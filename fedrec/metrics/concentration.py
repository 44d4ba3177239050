# SPDX-License-Identifier: Apache-2.0
"""Metrics of how often each item is in a list: coverage of the catalogue, concentration on few
items."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedrec.metrics.base import ListMetric
from fedrec.metrics.block import RankedBlock


class CountMetric(ListMetric):
    """A metric of the numbers of lists that each item is in, the sum `lists`."""

    def sums(self, block: RankedBlock, k: int) -> Mapping[str, Tensor]:
        """`float64 [items]`: how many of the block's lists of length k hold each item."""

        def counted() -> Tensor:
            items = block.lists[:, :k][block.listed[:, :k]]
            found = torch.zeros(block.scores.shape[1], dtype=torch.float64)
            return found.index_add_(0, items, torch.ones(len(items), dtype=torch.float64))

        return {"lists": block.once(("lists", k), counted)}


class Coverage(CountMetric):
    """Share of the catalogue that is in at least one list."""

    name = "coverage"

    def value(self, sums: Mapping[str, np.ndarray]) -> float:
        """In [0, 1]."""
        return float((sums["lists"] > 0).mean())


class Gini(CountMetric):
    """Gini coefficient of how often each item is in a list: 0 if all are equally often,
    1 - 1/items if all lists hold the same single item."""

    name = "gini"
    lower_is_better = True

    def value(self, sums: Mapping[str, np.ndarray]) -> float:
        """In [0, 1]."""
        return gini(sums["lists"])


def gini(counts: np.ndarray) -> float:
    """Gini coefficient of amounts >= 0, `[n]`; NaN where all are zero.

    The mean difference of two of them, over twice their mean.
    """
    ascending = np.sort(counts.astype(np.float64))
    number = len(ascending)
    total = ascending.sum()
    places = np.arange(1, number + 1)
    if not total:
        return float("nan")
    return float((2 * places - number - 1) @ ascending / (number * total))
