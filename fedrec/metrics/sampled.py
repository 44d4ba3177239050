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

import numpy as np
import torch
from pydantic import Field
from scipy.special import gammaln
from torch import Tensor

from fedrec.config import Config
from fedrec.metrics.base import UserMetric
from fedrec.metrics.ranks import RankedBlock
from fedrec.runtime.ragged import within_groups

_LOG = logging.getLogger("fedrec")


class SampledListsConfig(Config):
    """Settings of sampled metrics."""

    items: int = Field(default=99, ge=1)
    """Number of items drawn for each positive; at most all never-seen items."""


class SampledMetric(UserMetric):
    """Mean over a user's held-out positives of an expectation over samples."""

    Config = SampledListsConfig
    config: SampledListsConfig
    paper = "He et al. 2017, section 4.1"

    def column(self, k: int) -> str:
        """Name with the number of list items including the positive, such as `hits-of-100@10`."""
        return f"{self.name}-{self.config.items + 1}@{k}"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
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
        """Expected gains of positives, `float64 [positives]`, from the probabilities of the ranks
        1, 2, ..., `chances [positives, ranks]`."""


class HitsOf(SampledMetric):
    """Share of a user's held-out positives among the first k of sampled lists."""

    name = "hits-of"

    def gain(self, block: RankedBlock, chances: Tensor) -> Tensor:
        """Gain of 1 for each of the first k ranks, `float64 [positives]`."""
        return chances.sum(1)


class NdcgOf(SampledMetric):
    """Mean of 1 / log2(rank + 1) in sampled lists, 0 beyond k."""

    name = "ndcg-of"

    def gain(self, block: RankedBlock, chances: Tensor) -> Tensor:
        """Gain of 1 / log2(rank + 1) for the first k ranks, `float64 [positives]`."""
        return chances @ block.gains(chances.shape[1])


@cache
def _tell_short(metric: str, catalogue: int) -> None:
    """Warn once that the lists of a metric are shorter than its name says."""
    _LOG.warning(
        "%s ranks among fewer items than its name says: the catalogue has %d; sample fewer"
        " (evaluation.sampled-items) to compare it with other data",
        metric,
        catalogue,
    )


def _competitors(block: RankedBlock) -> Tensor:
    """Numbers of candidate items above and tied with each positive, and in total, `int64
    [positives, 3]`."""
    users, items, _ = block.positives
    competitors = torch.zeros(len(users), 3, dtype=torch.int64)
    competitors[:, 2] = (~block.seen).sum(1)[users]
    # The n-th positives of all users are compared with whole rows at once.
    number = within_groups(users.bincount(minlength=len(block.scores)).numpy())
    for n in range(int(number.max(initial=-1)) + 1):
        some = torch.from_numpy(np.flatnonzero(number == n))
        values = block.scores.new_full((len(block.scores),), torch.inf)
        values[users[some]] = block.scores[users[some], items[some]]
        above, tied = block.never_seen_levels(values)
        competitors[some, 0] = above[users[some]]
        competitors[some, 1] = tied[users[some]]
    return competitors


def _chances(block: RankedBlock, sampled: int) -> Tensor:
    """Probabilities that 0, 1, ... sampled items are ranked above, `float64 [positives, ranks]`.

    Of the items tied with a positive, a random number is above: each number from 0 to all is
    equally likely.
    """
    # a model that scores many items alike for many users has few distinct numbers
    distinct, row_of = _competitors(block).unique(dim=0, return_inverse=True)
    ranks = np.arange(min(block.longest, sampled + 1))
    rows = [np.zeros((0, len(ranks)))]
    for above, tied, available in distinct.tolist():
        higher = np.arange(above, above + tied + 1)[:, None]
        chances = _hypergeometric(ranks, higher, available, min(sampled, available))
        rows.append(chances.mean(0, keepdims=True))
    return torch.from_numpy(np.concatenate(rows))[row_of]


def _hypergeometric(
    number: np.ndarray, higher: np.ndarray, available: int, drawn: int
) -> np.ndarray:
    """Hypergeometric probability of `number` higher items among `drawn` of the `available`, which
    broadcast."""
    ways = _log_choose(higher, number) + _log_choose(available - higher, drawn - number)
    return np.exp(ways - _log_choose(available, drawn))


def _log_choose(n: np.ndarray | int, k: np.ndarray | int) -> np.ndarray:
    """Logarithm of the binomial coefficient; -infinity unless 0 <= k <= n."""
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
