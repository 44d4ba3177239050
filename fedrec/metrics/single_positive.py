# SPDX-License-Identifier: Apache-2.0
"""Metrics of single-positive lists (PrivRec, equations 12 and 13), see `fedrec.metrics.block`."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.metrics.base import UserMetric
from fedrec.metrics.block import RankedBlock


class Hits(UserMetric):
    """Share of a user's held-out positives that reach the first k places of their own lists."""

    name = "hits"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        return block.expected_gain(torch.ones(k, dtype=torch.float64, device=block.scores.device))


class DiscountedHits(UserMetric):
    """Mean over a user's held-out positives of 1 / log2(rank + 1), 0 beyond k: `hits` with the
    discount of NDCG, which PrivRec calls nDCG. Each positive is alone in its list; `ndcg` is that
    of the user's whole list, and has another value where a user has several positives."""

    name = "discounted-hits"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        return block.expected_gain(block.gains(k))
