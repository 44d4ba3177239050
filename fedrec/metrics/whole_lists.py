# SPDX-License-Identifier: Apache-2.0
"""Metrics of whole lists, one per user, see `fedrec.metrics.block`."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.metrics.base import UserMetric
from fedrec.metrics.block import RankedBlock


class Recall(UserMetric):
    """Share of a user's relevant items that are among the first k."""

    name = "recall"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        return block.hits[:, :k].sum(1) / block.number


class Precision(UserMetric):
    """Share of the first k places that hold a relevant item."""

    name = "precision"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        return block.hits[:, :k].sum(1) / k + block.nothing


class ListNdcg(UserMetric):
    """DCG of the first k places over that of the best possible list of length k."""

    name = "ndcg-list"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        gains = block.gains(k)
        ideal = torch.cat([gains.new_zeros(1), gains.cumsum(0)])
        dcg = (block.hits[:, :k] * ideal.diff()[: block.hits.shape[1]]).cumsum(1)
        return dcg[:, -1] / ideal[block.number.clamp(max=k)]


class AveragePrecision(UserMetric):
    """Sum of the precision at each relevant item among the first k, over the number of relevant
    items (others divide by the smaller of that and k)."""

    name = "map"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        hits = block.hits[:, :k]
        places = torch.arange(1, hits.shape[1] + 1, device=hits.device)
        return (hits * hits.cumsum(1) / places).cumsum(1)[:, -1] / block.number


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
