# SPDX-License-Identifier: Apache-2.0
"""How often each item is in a list."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedrec.metrics.base import ListMetric
from fedrec.metrics.block import RankedBlock


class CountMetric(ListMetric):
    """A metric of the numbers of lists that each item is in, the sum `lists`."""

    def sums(self, block: RankedBlock, k: int) -> Mapping[str, Tensor]:
        """`float64 [items]`: how many of the block's lists of length k hold each item."""
        items = block.lists[:, :k][block.listed[:, :k]]
        return {"lists": torch.bincount(items, minlength=block.scores.shape[1]).double()}
