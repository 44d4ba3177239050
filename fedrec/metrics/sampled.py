# SPDX-License-Identifier: Apache-2.0
"""Ranking against a few sampled items (He et al. 2017, section 4.1), in expectation over the
sample.

NCF and most federated recommenders rank each held-out positive among n items (99) that are drawn
from those that its user never interacted with. With N such items of which g score higher, the
number of higher ones in a sample without replacement is hypergeometric, and the rank is that number
plus one. So the expected `hits-of-M@k` and `ndcg-of-M@k`, with M = n + 1 the length of the list,
follow from the full ranking: no figure here depends on which items were drawn. Items of equal score
are ordered at random, as in `fedrec.metrics.ranks`; a constant score gets k / M hits.

Sampled metrics are not consistent with full ones (Krichene and Rendle 2020): they are provided for
comparison with published figures, in addition to the full ranking.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from functools import cache

import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.metrics.base import UserMetric
from fedrec.metrics.ranks import RankedBlock

_LOG = logging.getLogger("fedrec")


class SampledListsConfig(Config):
    """Settings of sampled metrics."""

    items: int = Field(default=99, ge=1)
    """Items drawn for each positive; all never-seen items where these are fewer."""


class SampledMetric(UserMetric):
    """Mean over a user's held-out positives of an expectation over samples."""

    Config = SampledListsConfig
    config: SampledListsConfig
    paper = "He et al. 2017, section 4.1"

    def column(self, k: int) -> str:
        """Its name with the length of the lists, items and positive, such as `hits-of-100@10`."""
        return f"{self.name}-{self.config.items + 1}@{k}"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        users, _, weight = block.positives
        drawn = self.config.items
        catalogue = block.scores.shape[1]
        if catalogue <= drawn:
            _tell_short(f"{self.name}-{drawn + 1}", catalogue)
        chances = block.once(("sampled", drawn), lambda: _chances(block, drawn))
        gain = self.gain(block, chances[:, :k])
        return block.sum_by_user(weight * gain, users) / block.total_weight

    @abstractmethod
    def gain(self, block: RankedBlock, chances: Tensor) -> Tensor:
        """`float64 [positives]`: expected gains of positives whose ranks 1, 2, ... have the
        probabilities `chances [positives, places]`."""


class HitsOf(SampledMetric):
    """Share of a user's held-out positives that are among the first k of sampled lists."""

    name = "hits-of"

    def gain(self, block: RankedBlock, chances: Tensor) -> Tensor:
        """One for each of the first k ranks."""
        return chances.sum(1)


class NdcgOf(SampledMetric):
    """Mean of 1 / log2(rank + 1) in sampled lists, 0 beyond k."""

    name = "ndcg-of"

    def gain(self, block: RankedBlock, chances: Tensor) -> Tensor:
        """1 / log2(rank + 1) for each of the first k ranks."""
        return chances @ block.gains(chances.shape[1])


@cache
def _tell_short(metric: str, catalogue: int) -> None:
    """Once: the lists of a metric are shorter than its name says."""
    _LOG.warning(
        "%s ranks among fewer items than its name says: the catalogue has %d; sample fewer"
        " (evaluation.sampled-items) to compare it with other data",
        metric,
        catalogue,
    )


def _competitors(block: RankedBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of items that are drawn from above and tied with each positive, and in total, each
    `int64 [positives]`."""
    users, items, _ = block.positives
    scores = block.scores
    higher = torch.empty_like(users)
    equal = torch.empty_like(users)
    # The n-th positives of all users are compared with whole rows at once.
    counts = torch.bincount(users, minlength=len(scores))
    place = torch.arange(len(users), device=users.device) - (counts.cumsum(0) - counts)[users]
    never = block.sampled
    for number in range(int(counts.max()) if len(users) else 0):
        chosen = (place == number).nonzero()[:, 0]
        own = users[chosen]
        value = scores[users[chosen], items[chosen]][:, None]
        rows = scores[own]
        free = never[own]
        higher[chosen] = ((rows > value) & free).sum(1)
        equal[chosen] = ((rows == value) & free).sum(1)
    return higher, equal, never.sum(1)[users]


def _chances(block: RankedBlock, sampled: int) -> Tensor:
    """`float64 [positives, places]`: probabilities that 0, 1, ... items of a sample are ranked
    above.

    Of the items tied with a positive, a random number is above: each number from 0 to all is
    equally likely.
    """
    # a model that scores many items alike for many users has few distinct numbers
    numbers = torch.stack(_competitors(block), 1)
    distinct, places = numbers.unique(dim=0, return_inverse=True)
    higher, equal, available = distinct.T
    longest = min(block.longest, sampled + 1)
    most = int(available.max()) + 1 if len(distinct) else 1
    logs = torch.lgamma(torch.arange(1, most + 1, device=numbers.device).double())
    found = _hypergeometric(higher, available, longest, sampled, logs)
    for row in (equal > 0).nonzero()[:, 0].tolist():
        above = torch.arange(int(equal[row]) + 1, device=higher.device) + higher[row]
        found[row] = _hypergeometric(
            above, available[row].expand_as(above), longest, sampled, logs
        ).mean(0)
    return found[places]


def _hypergeometric(
    higher: Tensor, available: Tensor, longest: int, sampled: int, logs: Tensor
) -> Tensor:
    """`float64 [n, longest]`: probabilities of j `higher` items in a sample of the `available`
    ones, `int64 [n]`, given the logarithms of 0!, 1!, ... up to the most available."""
    drawn = available.clamp(max=sampled)[:, None]
    higher = higher[:, None]
    available = available[:, None]
    j = torch.arange(longest, device=higher.device)[None]
    rest = available - higher
    possible = (j <= higher) & (j <= drawn) & (drawn - j <= rest)
    ways = _log_choose(higher, j, logs) + _log_choose(rest, drawn - j, logs)
    ways = ways - _log_choose(available, drawn, logs)
    return torch.where(possible, ways.exp(), 0.0)


def _log_choose(whole: Tensor, part: Tensor, logs: Tensor) -> Tensor:
    """Logarithm of the binomial coefficient; arbitrary if it is not defined."""
    last = len(logs) - 1
    parts = (whole, part.clamp(0, last), (whole - part).clamp(0, last))
    total, one, other = (logs.take(number) for number in parts)
    return total - one - other
