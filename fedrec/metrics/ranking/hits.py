# SPDX-License-Identifier: Apache-2.0
"""Hit rate of single-positive lists (PrivRec, equation 12)."""

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
