# SPDX-License-Identifier: Apache-2.0
"""The contract of a centralised recommender that stands beside the federated ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.privacy.stated import Stated


@dataclass(frozen=True, eq=False)
class Histories:
    """Positive items per user, ragged.

    Attributes:
        num_items: size of the catalogue.
        offsets: `int64 [users + 1]`; user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [total]`, each in `[0, num_items)`; may repeat within a user.
    """

    num_items: int
    offsets: np.ndarray
    items: np.ndarray

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.offsets) - 1

    def rows(self) -> np.ndarray:
        """`int64 [total]`: the user of each entry of `items`."""
        return np.repeat(np.arange(self.num_users), np.diff(self.offsets))

    def block(self, start: int, stop: int) -> Histories:
        """Users `start` to `stop - 1`."""
        offsets = self.offsets[start : stop + 1]
        return Histories(self.num_items, offsets - offsets[0], self.items[offsets[0] : offsets[-1]])

    def matrix(self) -> torch.Tensor:
        """Binary `float32 [users, items]`; for a block of users only."""
        dense = torch.zeros(self.num_users, self.num_items)
        dense[torch.from_numpy(self.rows()), torch.from_numpy(self.items.astype(np.int64))] = 1.0
        return dense


class Baseline(ABC):
    """A centralised recommender: it sees the data of all training users.

    A subclass lives in a file of its own in `fedrec/baselines/`, its configuration class above it.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def fit(self, histories: Histories) -> None:
        """Learn from the positive items of the training users."""

    @abstractmethod
    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores `float32 [users, items]` for users given by what they are known to like (a block of users)."""

    def stated(self) -> Stated | None:
        """What is said of its privacy, once it is fitted; None: nothing, it has none."""
        return None


@dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings, one per row.

    Attributes:
        num_users: number of users.
        num_items: size of the catalogue.
        users: `int64 [rows]`.
        items: `int64 [rows]`.
        values: `float64 [rows]`.
    """

    num_users: int
    num_items: int
    users: np.ndarray
    items: np.ndarray
    values: np.ndarray


class RatingBaseline(Baseline):
    """A centralised predictor of ratings; it ranks nothing."""

    @abstractmethod
    def fit_ratings(self, ratings: Ratings) -> None:
        """Learn from the ratings of the training users."""

    @abstractmethod
    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`.

        Args:
            known: all that is known of the users that are asked about: the ratings of their training rows.
            users: `int64 [rows]`, as in `known`.
            items: `int64 [rows]`.
        """

    def fit(self, histories: Histories) -> None:
        """Always refused.

        Raises:
            ExperimentError: it needs ratings.
        """
        raise ExperimentError(
            f"baseline {type(self).__name__!r} predicts ratings and ranks nothing",
            expected="task = 'rating'",
            got="task = 'ranking'",
            fix="leave it out of evaluation.baselines",
        )

    def scores(self, histories: Histories) -> torch.Tensor:
        """See `fit`."""
        raise NotImplementedError("Expected a baseline that ranks.")
