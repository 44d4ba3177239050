# SPDX-License-Identifier: Apache-2.0
"""NDCG of single-positive lists (PrivRec, equation 13)."""

from __future__ import annotations

from torch import Tensor

from fedrec.metrics.base import UserMetric
from fedrec.metrics.block import RankedBlock


class Ndcg(UserMetric):
    """Mean over a user's held-out positives of 1 / log2(rank + 1), 0 beyond k; each is alone in its
    list, so the ideal DCG is 1."""

    name = "ndcg"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        return block.expected_gain(block.gains(k))
