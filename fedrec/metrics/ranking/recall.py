# SPDX-License-Identifier: Apache-2.0
"""Recall of whole lists."""

from __future__ import annotations

from torch import Tensor

from fedrec.metrics.base import UserMetric
from fedrec.metrics.block import RankedBlock


class Recall(UserMetric):
    """Share of a user's relevant items that are among the first k."""

    name = "recall"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        return block.hits[:, :k].sum(1) / block.number
