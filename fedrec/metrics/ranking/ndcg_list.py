# SPDX-License-Identifier: Apache-2.0
"""NDCG of whole lists."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.metrics.base import UserMetric
from fedrec.metrics.block import RankedBlock


class ListNdcg(UserMetric):
    """DCG of the first k places over that of the best possible list of length k."""

    name = "ndcg-list"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        gains = block.gains(k)
        ideal = torch.cat([gains.new_zeros(1), gains.cumsum(0)])
        dcg = (block.hits[:, :k] * ideal.diff()[: block.hits.shape[1]]).cumsum(1)
        return dcg[:, -1] / ideal[block.number.clamp(max=k)]
