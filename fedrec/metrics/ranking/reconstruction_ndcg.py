# SPDX-License-Identifier: Apache-2.0
"""NDCG of a user's whole history; see `reconstruction_recall`."""

from __future__ import annotations

from torch import Tensor

from fedrec.metrics.base import UserMetric
from fedrec.metrics.block import RankedBlock


class ReconstructionNdcg(UserMetric):
    """DCG of the first k places over that of the best possible list of that length."""

    name = "reconstruction-ndcg"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        hits = block.hits[:, :k]
        gains = block.gains(hits.shape[1])
        best = block.number.clamp(min=1, max=len(gains))
        return (hits * gains).cumsum(1)[:, -1] / gains.cumsum(0)[best - 1] + block.nothing
