# SPDX-License-Identifier: Apache-2.0
"""The interface of metrics, and all metrics: of predicted ratings, and of ranked lists (relevance,
coverage, popularity, promoted items, reconstruction, and lists of sampled items)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.metrics.ranks import RankedBlock, pairs
from fedrec.runtime.ragged import within_groups

_LOG = logging.getLogger("fedrec")


class RatedBlock:
    """Errors of predicted ratings.

    Args:
        predicted: `float [rows]`.
        actual: `float [rows]`.
        users: `int64 [rows]`, each in `[0, num_users)`; None: all are of one user.
        num_users: number of users.
        targets: `float [num_users, targets]`, predictions for the items that an adversary promotes,
            NaN for those that a user has rated; None without an adversary.

    Attributes:
        errors: `float64 [rows]`, predicted minus actual.
        counts: `int64 [num_users]`, number of rows of each user.

    Raises:
        ExperimentError: a prediction is NaN.
        ValueError: the lengths differ.
    """

    def __init__(
        self,
        predicted: np.ndarray,
        actual: np.ndarray,
        users: np.ndarray | None = None,
        num_users: int = 1,
        targets: np.ndarray | None = None,
    ) -> None:
        if predicted.shape != actual.shape:
            raise ValueError(
                f"Expected as many predictions as ratings, got {predicted.shape} and"
                f" {actual.shape}."
            )
        self.errors = np.asarray(predicted, np.float64) - np.asarray(actual, np.float64)
        nans = int(np.isnan(self.errors).sum())
        if nans:
            raise ExperimentError(
                "predicted ratings contain NaN",
                expected="finite predictions",
                got=f"{nans} NaN among {len(self.errors)} predictions",
                fix="training has probably diverged: lower the learning rate or the noise",
            )
        self._users = np.zeros(len(predicted), np.int64) if users is None else users
        self.counts = np.bincount(self._users, minlength=num_users)
        self.targets = targets

    def means(self, values: np.ndarray) -> np.ndarray:
        """Mean over each user's rows of `values [rows]`, `float64 [num_users]`; NaN without
        rows."""
        if len(self.counts) == 1 and len(values):  # pairwise sum, more exact than bincount's
            return np.array([values.mean()])
        with np.errstate(invalid="ignore"):
            return np.bincount(self._users, values, len(self.counts)) / self.counts


class Metric(ABC):
    """Base of all metrics; derive from `UserMetric`, `RatingMetric` or `ListMetric`.

    Attributes:
        name: name in tables, before `@k`.
        lower_is_better: whether the smaller value is the better one.
        range: smallest and largest possible value.
        has_k: whether there is one value for each list length of `evaluation.ks`.
        task: task of the experiments that the metric is for.
    """

    Config: ClassVar[type[Config]] = Config
    name: ClassVar[str]
    lower_is_better: ClassVar[bool] = False
    range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    has_k: ClassVar[bool] = True
    task: ClassVar[Literal["ranking", "rating"]] = "ranking"

    def __init__(self, config: Config) -> None:
        self.config = config

    def column(self, k: int) -> str:
        """Name in tables for lists of length k."""
        return f"{self.name}@{k}" if self.has_k else self.name


class UserMetric(Metric):
    """A metric of each user's list; its overall value is the mean over users with a value."""

    @abstractmethod
    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """Values of users, `float64 [users]`; NaN for users without a held-out positive. Without
        `has_k`, k is the first length of `evaluation.ks`."""


class RatingMetric(Metric):
    """A metric of each user's predicted ratings."""

    task = "rating"
    has_k = False
    range = (0.0, float("inf"))
    lower_is_better = True

    @abstractmethod
    def per_user(self, block: RatedBlock) -> np.ndarray:
        """Values of users, `float64 [users]`; NaN for users without a held-out rating."""

    @abstractmethod
    def pooled(self, values: np.ndarray, rows: np.ndarray) -> float:
        """Overall value from users with ratings.

        Args:
            values: `float64 [users]`, as from `per_user`.
            rows: `float64 [users]`, number of held-out ratings of each.
        """


class ListMetric(Metric):
    """A metric of the lists of all users together, computed only from sums over users, which nodes
    can aggregate for the server."""

    @abstractmethod
    def sums(self, block: RankedBlock, k: int) -> Mapping[str, Tensor]:
        """Sums over a block of users, `float64 [...]` by name; metrics share sums of equal
        names."""

    @abstractmethod
    def value(self, sums: Mapping[str, np.ndarray]) -> float:
        """Overall value from the sums over all users; NaN without a list."""


# Errors of predicted ratings, pooled over all rows (MetaMF, PNBM), which weights a user by the
# number of held-out ratings.


class MeanAbsoluteError(RatingMetric):
    """Mean absolute error."""

    name = "mae"

    def per_user(self, block: RatedBlock) -> np.ndarray:
        """Error over each user's rows."""
        return block.means(np.abs(block.errors))

    def pooled(self, values: np.ndarray, rows: np.ndarray) -> float:
        """Error over all rows."""
        return float(np.average(values, weights=rows))


class RootMeanSquaredError(RatingMetric):
    """Root of the mean squared error."""

    name = "rmse"

    def per_user(self, block: RatedBlock) -> np.ndarray:
        """Error over each user's rows."""
        return np.sqrt(block.means(np.square(block.errors)))

    def pooled(self, values: np.ndarray, rows: np.ndarray) -> float:
        """Error over all rows."""
        return float(np.sqrt(np.average(np.square(values), weights=rows)))


# Metrics of the items that an adversary promotes, which make no lists.


class TargetRating(RatingMetric):
    """Mean predicted rating of an adversary's targets. Prediction shift is its difference between
    two runs, with and without the attack."""

    name = "target-rating"
    paper = "O'Mahony, Hurley, Kushmerick and Silvestre 2004"
    range = (float("-inf"), float("inf"))

    def per_user(self, block: RatedBlock) -> np.ndarray:
        """Mean over the targets that a user has not rated, `float64 [users]`; NaN without any, and
        where the server generates parameters for the rated items only."""
        if block.targets is None:
            return np.full(len(block.counts), np.nan)
        unrated = ~np.isnan(block.targets)
        with np.errstate(invalid="ignore"):
            return np.where(unrated, block.targets, 0.0).sum(1) / unrated.sum(1)

    def pooled(self, values: np.ndarray, rows: np.ndarray) -> float:
        """Mean over the users who have not rated all targets, equally weighted; NaN without any."""
        unrated = values[~np.isnan(values)]
        return float(unrated.mean()) if len(unrated) else float("nan")


# Metrics of whole lists, one per user, see `fedrec.metrics.ranks`; ties count by expectation.


class Recall(UserMetric):
    """Share of a user's relevant items that are among the first k."""

    name = "recall"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        return block.hits[:, :k].sum(1) / block.number


class CappedRecall(UserMetric):
    """Relevant items among the first k, over the most that k places can hold: the smaller of k and
    the number of the user's relevant items."""

    name = "capped-recall"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        return block.hits[:, :k].sum(1) / block.number.clamp(max=k)


class Precision(UserMetric):
    """Share of relevant items among the first k."""

    name = "precision"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        return block.hits[:, :k].sum(1) / k + block.nothing


class HitRate(UserMetric):
    """Classic hit rate: probability of at least one relevant item among the first k. `hits@k` is
    the share of relevant items, each ranked alone."""

    name = "hit-rate"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        number, relevant, earlier = (part[:, :k] for part in block.ties)
        # Given that the earlier positions of its level hold no relevant item.
        misses = (1 - relevant / (number - earlier)).clamp(min=0)
        return 1 - misses.prod(1) + block.nothing


class Ndcg(UserMetric):
    """DCG of the first k positions over that of the best possible list of length k."""

    name = "ndcg"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        gains = block.gains(k)
        ideal = torch.cat([gains.new_zeros(1), gains.cumsum(0)])
        dcg = (block.hits[:, :k] * ideal.diff()[: block.hits.shape[1]]).cumsum(1)
        return dcg[:, -1] / ideal[block.number.clamp(max=k)]


class AveragePrecision(UserMetric):
    """Sum of the precision at each relevant item among the first k, over the number of relevant
    items (others divide by the smaller of that and k)."""

    name = "map"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        number, relevant, earlier = (part[:, :k] for part in block.ties)
        hits = block.hits[:, :k]
        both = hits * (relevant - 1) / (number - 1).clamp(min=1)
        above = hits.cumsum(1) - (earlier + 1) * hits
        total = hits + above * hits + earlier * both
        ranks = torch.arange(1, hits.shape[1] + 1, device=hits.device)
        return (total / ranks).cumsum(1)[:, -1] / block.number


class ReciprocalRank(UserMetric):
    """1 / rank of the first relevant item in the full list of the catalogue."""

    name = "mrr"
    has_k = False

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
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
    """Expected 1 / rank of the first relevant item among tied items in random order, `float64
    [users]`.

    If none of the first x - 1 of T tied items is relevant, the x-th is with probability
    R / (T - x + 1).

    Args:
        above: number of items with higher scores, `int64 [users]`.
        number: T, `int64 [users]`.
        relevant: R, `int64 [users]`, from 1 to T.
    """
    x = torch.arange(1, int(number.max()) + 1, device=number.device)
    chances = relevant[:, None] / (number[:, None] - x + 1).clamp(min=1).double()
    missed = (1 - chances.clamp(max=1)).cumprod(1).roll(1, dims=1)
    missed[:, 0] = 1
    return (missed * chances / (above[:, None] + x)).sum(1)


# Metrics of the items that an adversary promotes, over the users who have not rated them: of their
# ranks in lists.
#
# A user's list is the whole list of `fedrec.metrics.ranks`, which leaves out what the user knows.
# Users who rated a target in any part of the data have no value for it; of several targets, a
# user's value is the mean over those that it has not rated. Ties count by expectation, as if broken
# at random.
#
# FedRecAttack (Rong, Ye, et al. 2022) and A-hum (Rong, He and Chen 2022) leave a user's held-out
# items out of the list as well.


class _TargetMetric(UserMetric):
    """A metric of the rank of each target in a user's list."""

    def _mean(self, block: RankedBlock, values: Tensor) -> Tensor:
        """Means of `values [users, targets]` over the targets that a user has not rated, `float64
        [users]`; NaN without any."""
        unrated = ~block.seen[:, block.given("targets")]
        return (values * unrated).sum(1) / unrated.sum(1)


class Exposure(_TargetMetric):
    """Exposure ratio at k (ER@k): share of users with a target among the first k, of those who have
    not rated it."""

    name = "exposure"
    paper = "Rong, Ye, Zhao, Yuen, Chen and He 2022"
    lower_is_better = True

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """Values of users, `float64 [users]`; NaN for users who rated all targets."""
        above, tied = _ranks(block)
        listed = (above + tied).clamp(max=k) - above.clamp(max=k)
        return self._mean(block, listed / tied.clamp(min=1).double())


class TargetRank(_TargetMetric):
    """Relative rank of a target in a user's list: near 0 at the top, 1 at the end. A rank shift is
    the difference between two runs, without and with the attack."""

    name = "target-rank"
    has_k = False

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """Values of users, `float64 [users]`, in (0, 1]; NaN for users who rated all targets."""
        above, tied = _ranks(block)
        length = (~block.masked).sum(1, keepdim=True).clamp(min=1)
        return self._mean(block, (above + (tied + 1).double() / 2) / length)


def _ranks(block: RankedBlock) -> tuple[Tensor, Tensor]:
    """Numbers of items ranked above each target, and tied with it including itself, `int64 [users,
    targets]` each."""

    def count() -> tuple[Tensor, Tensor]:
        users = torch.arange(len(block.scores))
        candidates = (target.expand_as(users) for target in block.given("targets"))
        levels = [block.levels(block.candidates(users, items)) for items in candidates]
        above, tied = zip(*levels, strict=True)
        return torch.stack(above, 1), torch.stack(tied, 1)

    return block.once("ranks of targets", count)


class _CountMetric(ListMetric):
    """A metric of the number of lists that contain each item, the sum `lists`."""

    def sums(self, block: RankedBlock, k: int) -> Mapping[str, Tensor]:
        """Number of the block's lists of length k that contain each item, `float64 [items]`."""
        items = block.lists[:, :k][block.listed[:, :k]]
        return {"lists": items.bincount(minlength=block.scores.shape[1]).double()}


class Coverage(_CountMetric):
    """Share of the catalogue that is in at least one list."""

    name = "coverage"

    def value(self, sums: Mapping[str, np.ndarray]) -> float:
        """Overall value, in [0, 1]."""
        return float((sums["lists"] > 0).mean())


class Gini(_CountMetric):
    """Gini coefficient of item frequencies in lists: 0 if equal, 1 - 1/items if all lists contain
    only the same item."""

    name = "gini"
    lower_is_better = True

    def value(self, sums: Mapping[str, np.ndarray]) -> float:
        """Overall value, in [0, 1]."""
        return gini(sums["lists"])


def gini(counts: np.ndarray) -> float:
    """Gini coefficient of amounts >= 0, `[n]`; NaN where all are zero.

    Computed as the mean difference of two amounts, over twice their mean.
    """
    ascending = np.sort(counts.astype(np.float64))
    number = len(ascending)
    total = ascending.sum()
    if not total:
        return float("nan")
    return float((2 * np.arange(1, number + 1) - number - 1) @ ascending / (number * total))


class ListPopularity(ListMetric):
    """Mean over users of the mean popularity of the items in the list, which is the share of
    training users who like an item."""

    name = "popularity"
    lower_is_better = True

    def sums(self, block: RankedBlock, k: int) -> Mapping[str, Tensor]:
        """Sum over the users with a value, and their number, `float64 [2]`."""
        values = self._of_users(block, k)
        known = ~values.isnan()
        return {self.name: torch.stack([values[known].sum(), known.sum().double()])}

    def value(self, sums: Mapping[str, np.ndarray]) -> float:
        """Mean over users; NaN without users."""
        total, users = sums[self.name].tolist()
        return total / users if users else float("nan")

    def _of_users(self, block: RankedBlock, k: int) -> Tensor:
        """Values of users, `float64 [users]`, in [0, 1]; NaN for an empty list."""
        shares = block.given("popularity")[block.lists] * block.listed
        return shares[:, :k].sum(1) / block.listed[:, :k].sum(1)


class PopularityLift(ListPopularity):
    """Mean popularity of the items in the list over that of the user's known liked items, minus 1;
    mean over the users who have such items."""

    name = "popularity-lift"
    range = (-1.0, float("inf"))
    paper = "Abdollahpouri, Mansoury, Burke and Mobasher 2019"

    def _of_users(self, block: RankedBlock, k: int) -> Tensor:
        """Values of users, `float64 [users]`; NaN without known liked items that others like
        too."""
        users, items = pairs(block.given("liked"))
        sums = block.sum_by_user(block.given("popularity")[items], users)
        means = sums / users.bincount(minlength=len(sums))
        return super()._of_users(block, k) / torch.where(means > 0, means, torch.nan) - 1


# Metrics of single-positive lists (PrivRec, equations 12 and 13), see `fedrec.metrics.ranks`.


class Hits(UserMetric):
    """Share of a user's held-out positives among the first k, each ranked in a list of its own."""

    name = "hits"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        return block.expected_gain(torch.ones(k, dtype=torch.float64, device=block.scores.device))


class DiscountedHits(UserMetric):
    """Mean over a user's held-out positives of 1 / log2(rank + 1), 0 beyond k: `hits` with the
    discount of NDCG, which PrivRec calls nDCG. Each positive is alone in its list; `ndcg` is that
    of the user's whole list, and has another value where a user has several positives."""

    name = "discounted-hits"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        return block.expected_gain(block.gains(k))


# Metrics of a user's whole history, in experiments with `evaluation.protocol = "reconstruction"`.
#
# The catalogue is ranked with nothing masked. This does not measure recommendation, because most
# relevant items are part of the model's input. It exists because it alone explains how Fang et al.
# (DP-VAE, table 8) can print a Recall@20 above their Recall@50: with `hits / min(|Q|, R)` (their
# equation 22) that needs most users to have more than 20 items in Q. The name differs, so that its
# figures cannot be mistaken for those of held-out items.


class ReconstructionRecall(UserMetric):
    """Relevant items among the first k, over the smaller of their number and k."""

    name = "reconstruction-recall"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        hits = block.hits[:, :k]
        return hits.sum(1) / block.number.clamp(min=1, max=hits.shape[1]) + block.nothing


class ReconstructionNdcg(UserMetric):
    """DCG of the first k positions over that of the best possible list of that length."""

    name = "reconstruction-ndcg"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        hits = block.hits[:, :k]
        gains = block.gains(hits.shape[1])
        best = block.number.clamp(min=1, max=len(gains))
        return (hits * gains).cumsum(1)[:, -1] / gains.cumsum(0)[best - 1] + block.nothing


# Ranking against a few sampled items (He et al. 2017, section 4.1), in expectation over the sample.
#
# NCF and most federated recommenders rank each held-out positive among n items (99) that are drawn
# from those that its user never interacted with. With N such items of which g score higher, the
# number of higher ones in a sample without replacement is hypergeometric, and the rank is that
# number plus one. So the expected `hits-of-M@k` and `ndcg-of-M@k`, with M = n + 1 the length of the
# list, follow from the full ranking: no figure here depends on which items were drawn. Items of
# equal score are ordered at random, as in `fedrec.metrics.ranks`; a constant score gets k / M hits.
#
# Sampled metrics are not consistent with full ones (Krichene and Rendle 2020): they are provided
# for comparison with published figures, in addition to the full ranking.


class SampledListsConfig(Config):
    """Settings of sampled metrics."""

    items: int = Field(default=99, ge=1)
    """Number of items drawn for each positive; at most all never-seen items."""


class _SampledMetric(UserMetric):
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
        gain = self._gain(block, chances[:, :k])
        return block.sum_by_user(weight * gain, users) / block.total_weight

    @abstractmethod
    def _gain(self, block: RankedBlock, chances: Tensor) -> Tensor:
        """Expected gains of positives, `float64 [positives]`, from the probabilities of the ranks
        1, 2, ..., `chances [positives, ranks]`."""


class HitsOf(_SampledMetric):
    """Share of a user's held-out positives among the first k of sampled lists."""

    name = "hits-of"

    def _gain(self, block: RankedBlock, chances: Tensor) -> Tensor:
        """Gain of 1 for each of the first k ranks, `float64 [positives]`."""
        return chances.sum(1)


class NdcgOf(_SampledMetric):
    """Mean of 1 / log2(rank + 1) in sampled lists, 0 beyond k."""

    name = "ndcg-of"

    def _gain(self, block: RankedBlock, chances: Tensor) -> Tensor:
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
    from scipy.special import gammaln  # slow to import, and few metrics are of sampled items

    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
