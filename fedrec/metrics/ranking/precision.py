# SPDX-License-Identifier: Apache-2.0
"""Precision of whole lists."""

from __future__ import annotations

from torch import Tensor

from fedrec.metrics.base import UserMetric
from fedrec.metrics.block import RankedBlock


class Precision(UserMetric):
    """Share of the first k places that hold a relevant item."""

    name = "precision"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        return block.hits[:, :k].sum(1) / k + block.nothing
