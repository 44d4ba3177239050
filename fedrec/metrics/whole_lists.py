# SPDX-License-Identifier: Apache-2.0
"""Metrics of whole lists, one per user, see `fedrec.metrics.block`; ties count by expectation."""

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


class HitRate(UserMetric):
    """Probability that the first k places hold at least one relevant item: the classic hit rate.
    `hits@k` ranks each relevant item alone instead, and is a share of them."""

    name = "hit-rate"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        number, relevant, earlier = (part[:, :k] for part in block.ties)
        # Given that the earlier places of its level hold no relevant item.
        misses = (1 - relevant / (number - earlier)).clamp(min=0)
        return 1 - misses.prod(1) + block.nothing


class Ndcg(UserMetric):
    """DCG of the first k places over that of the best possible list of length k."""

    name = "ndcg"

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
        number, relevant, earlier = (part[:, :k] for part in block.ties)
        hits = block.hits[:, :k]
        both = hits * (relevant - 1) / (number - 1).clamp(min=1)
        above = hits.cumsum(1) - (earlier + 1) * hits
        found = hits + above * hits + earlier * both
        places = torch.arange(1, hits.shape[1] + 1, device=hits.device)
        return (found / places).cumsum(1)[:, -1] / block.number


_GROWTH = 1e4  # of rounding, below which 11 digits are left


class ReciprocalRank(UserMetric):
    """1 / rank of the first relevant item in the full list of the catalogue."""

    name = "mrr"
    has_k = False

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        users, items = block.wanted
        top = block.scores.new_full((len(block.scores),), -torch.inf)
        top.scatter_reduce_(0, users, block.candidates(users, items), "amax")
        above, number = block.levels(top)
        relevant = block.count_wanted(top)
        expected = (above + 1).double().reciprocal()
        tied = ((relevant < number) & (top > -torch.inf)).nonzero()[:, 0]
        if len(tied):
            expected[tied] = _first_of_tied(above[tied], number[tied], relevant[tied])
        expected[top == -torch.inf] = 0.0
        return expected + block.nothing


def _first_of_tied(above: Tensor, number: Tensor, relevant: Tensor) -> Tensor:
    """Expected 1 / rank of the first relevant one of tied items in random order, `float64 [users]`:
    it is the x-th of T with probability C(T - x, R - 1) / C(T, R).

    For R = 1 this is (H(a + T) - H(a)) / T with harmonic numbers H and a items above; splitting
    1 / (a + x) gives it for R from R - 1. Where that would lose digits, its terms are added up.

    Args:
        above: a, number of items with higher scores, `int64 [users]`.
        number: T, `int64 [users]`.
        relevant: R >= 1, `int64 [users]`.
    """
    a = above.double()
    t = number.double()
    harmonic = torch.digamma(a + t + 1) - torch.digamma(a + 1)
    expected = harmonic / t
    growth = relevant * (1 + a / t) ** relevant  # of a relative error
    for r in range(2, int(relevant.max()) + 1):
        more = r / ((r - 1) * (t - r + 1)) * ((a + t - r + 2) * expected - 1)
        expected = torch.where(relevant >= r, more, expected)
    unsure = (growth / harmonic > _GROWTH).nonzero()[:, 0]
    if len(unsure):
        expected[unsure] = _added_up(above[unsure], number[unsure], relevant[unsure])
    return expected


def _added_up(above: Tensor, number: Tensor, relevant: Tensor) -> Tensor:
    """The same, `float64 [users]`, term by term."""
    x = torch.arange(1, int(number.max()) + 1, device=number.device)
    left = number[:, None] - x
    needed = relevant[:, None] - 1
    possible = left >= needed
    log = _log_choose(left.clamp(min=0), needed) - _log_choose(number, relevant)[:, None]
    chances = log.exp() * possible
    return (chances / (above[:, None] + x)).sum(1)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    rest = (n - k).clamp(min=0)
    parts = [torch.lgamma(part.double() + 1) for part in (n, k, rest)]
    return parts[0] - parts[1] - parts[2]
