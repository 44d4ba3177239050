# SPDX-License-Identifier: Apache-2.0
"""The interface of metrics, and metrics of predicted ratings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.metrics.ranks import RankedBlock


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
