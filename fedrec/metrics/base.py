# SPDX-License-Identifier: Apache-2.0
"""The interface of metrics: of each user, or of the lists of all users together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from fedrec.config import Config
from fedrec.metrics.block import RankedBlock
from fedrec.metrics.rated import RatedBlock


class Metric(ABC):
    """What every metric says of itself; derive from `UserMetric`, `RatingMetric` or `ListMetric`.

    Attributes:
        name: its name in tables, before `@k`.
        lower_is_better: whether the smaller value is the better one.
        range: smallest and largest possible value.
        has_k: whether there is one value for each list length of `evaluation.ks`.
        task: of the experiments that it is for.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""
    name: ClassVar[str]
    lower_is_better: ClassVar[bool] = False
    range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    has_k: ClassVar[bool] = True
    task: ClassVar[Literal["ranking", "rating"]] = "ranking"

    def __init__(self, config: Config) -> None:
        self.config = config

    def column(self, k: int) -> str:
        """Its name in tables for lists of length k."""
        return f"{self.name}@{k}" if self.has_k else self.name


class UserMetric(Metric):
    """A metric of each user's list; the figure for all users is the mean over those with a
    value."""

    @abstractmethod
    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`; NaN for a user without a held-out positive. Without `has_k`, k is the
        first length of `evaluation.ks`."""


class RatingMetric(Metric):
    """A metric of each user's predicted ratings."""

    task = "rating"
    has_k = False
    range = (0.0, float("inf"))
    lower_is_better = True

    @abstractmethod
    def per_user(self, block: RatedBlock) -> np.ndarray:
        """`float64 [users]`; NaN for a user without a held-out rating."""

    @abstractmethod
    def pooled(self, values: np.ndarray, rows: np.ndarray) -> float:
        """The figure for all users, each with a rating.

        Args:
            values: `float64 [users]`, as from `per_user`.
            rows: `float64 [users]`, number of held-out ratings of each.
        """


class ListMetric(Metric):
    """A metric of the lists of all users together, computed from sums over users alone, so that
    nodes may add them up before the server sees them."""

    @abstractmethod
    def sums(self, block: RankedBlock, k: int) -> Mapping[str, Tensor]:
        """What is summed over users, `float64` of any shape by name, for a block of users; metrics
        that name the same sum share it."""

    @abstractmethod
    def value(self, sums: Mapping[str, np.ndarray]) -> float:
        """The figure, from the sums over all users; NaN without a list."""
