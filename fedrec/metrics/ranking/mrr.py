# SPDX-License-Identifier: Apache-2.0
"""Reciprocal rank of the first relevant item of a whole list."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.metrics.base import UserMetric
from fedrec.metrics.block import RankedBlock


class ReciprocalRank(UserMetric):
    """1 / rank of the first relevant item in the full list of the catalogue."""

    name = "mrr"
    has_k = False

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        candidates = block.candidates
        top = candidates.masked_fill(~block.wanted, -torch.inf).amax(1, keepdim=True)
        index = torch.arange(candidates.shape[1], device=candidates.device)
        first = (
            index.expand_as(candidates)
            .masked_fill(~(block.wanted & (candidates == top)), len(index))
            .amin(1, keepdim=True)
        )
        ahead = (candidates > top) | ((candidates == top) & (index < first))
        return (ahead.count_nonzero(dim=1) + 1).double().reciprocal() + block.nothing
