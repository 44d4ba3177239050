# SPDX-License-Identifier: Apache-2.0
"""Metrics of the items that an adversary promotes, over the users who have not rated them: of their
place in lists, and of their predicted ratings, which make no lists.

A user's list is the whole list of `fedrec.metrics.block`, which leaves out what the user knows.
Users who rated a target in any part of the data have no value for it; of several targets, a user's
value is the mean over those that it has not rated. Ties count by expectation, as if broken at
random.

FedRecAttack (Rong, Ye, et al. 2022) and A-hum (Rong, He and Chen 2022) leave a user's held-out
items out of the list as well.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedrec.metrics.base import RatingMetric, UserMetric
from fedrec.metrics.block import RankedBlock
from fedrec.metrics.rated import RatedBlock


class TargetMetric(UserMetric):
    """A metric of the place of each target in a user's list."""

    def mean(self, block: RankedBlock, values: Tensor) -> Tensor:
        """`float64 [users]`: means of `values [users, targets]` over the targets that a user has
        not rated; NaN without any."""
        unrated = ~block.seen[:, block.given("targets")]
        return (values * unrated).sum(1) / unrated.sum(1)

    def expected_sum(self, block: RankedBlock, gains: Tensor) -> Tensor:
        """`float64 [users, targets]`: expected gain of the targets' places; `gains` are those of
        the places 1 to k, `float64 [k]`, later ones have none."""
        above, tied = _places(block)
        running = torch.cat([gains.new_zeros(1), gains.cumsum(0)])
        first = running[above.clamp(max=len(gains))]
        last = running[(above + tied).clamp(max=len(gains))]
        return (last - first) / tied.clamp(min=1)


class Exposure(TargetMetric):
    """Exposure ratio at k (ER@k): share of the users who have not rated a target in whose first k
    places it is."""

    name = "exposure"
    paper = "Rong, Ye, Zhao, Yuen, Chen and He 2022"
    lower_is_better = True

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`; NaN for a user who rated all targets."""
        gains = torch.ones(k, dtype=torch.float64, device=block.scores.device)
        return self.mean(block, self.expected_sum(block, gains))


class TargetNdcg(TargetMetric):
    """NDCG at k of a target as if it alone were relevant."""

    name = "target-ndcg"
    lower_is_better = True

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`; NaN for a user who rated all targets."""
        return self.mean(block, self.expected_sum(block, block.gains(k)))


class TargetRank(TargetMetric):
    """Place of a target in a user's list as a share of the list's length: near 0 at the top, 1 at
    the end. A rank shift is the difference between two runs, without and with the attack."""

    name = "target-rank"
    has_k = False

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`, in (0, 1]; NaN for a user who rated all targets."""
        above, tied = _places(block)
        length = (~block.masked).sum(1, keepdim=True).clamp(min=1)
        return self.mean(block, (above + (tied + 1).double() / 2) / length)


class TargetRating(RatingMetric):
    """Predicted rating of the targets. Prediction shift is its difference between two runs, with
    and without the attack."""

    name = "target-rating"
    paper = "O'Mahony, Hurley, Kushmerick and Silvestre 2004"
    range = (float("-inf"), float("inf"))

    def per_user(self, block: RatedBlock) -> np.ndarray:
        """`float64 [users]`: mean over the targets that a user has not rated; NaN without any, and
        where the server generates parameters for the rated items alone."""
        if block.targets is None:
            return np.full(len(block.counts), np.nan)
        unrated = ~np.isnan(block.targets)
        with np.errstate(invalid="ignore"):
            return np.where(unrated, block.targets, 0.0).sum(1) / unrated.sum(1)

    def pooled(self, values: np.ndarray, rows: np.ndarray) -> float:
        """Mean over the users who have not rated all targets, NaN without any; each counts the
        same."""
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else float("nan")


def _places(block: RankedBlock) -> tuple[Tensor, Tensor]:
    """Numbers of items above each target in a user's list, and tied with it including itself,
    `int64 [users, targets]` each."""

    def count() -> tuple[Tensor, Tensor]:
        users = torch.arange(len(block.scores))
        found = [
            block.levels(block.candidates(users, target.expand_as(users)))
            for target in block.given("targets")
        ]
        above, tied = zip(*found, strict=True)
        return torch.stack(above, 1), torch.stack(tied, 1)

    return block.once("places of targets", count)
