# SPDX-License-Identifier: Apache-2.0
"""Mean average precision of whole lists, as in TREC."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.metrics.base import UserMetric
from fedrec.metrics.block import RankedBlock


class AveragePrecision(UserMetric):
    """Sum of the precision at each relevant item among the first k, over the number of relevant
    items (others divide by the smaller of that and k)."""

    name = "map"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        hits = block.hits[:, :k]
        places = torch.arange(1, hits.shape[1] + 1, device=hits.device)
        return (hits * hits.cumsum(1) / places).cumsum(1)[:, -1] / block.number
