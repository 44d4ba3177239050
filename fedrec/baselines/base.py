# SPDX-License-Identifier: Apache-2.0
"""The interface of centralised recommenders, the baselines of the federated ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from scipy import sparse

from fedrec.config import Config
from fedrec.data.interactions import FeatureNames, FeatureTable, Schema
from fedrec.errors import ExperimentError
from fedrec.privacy.statement import Stated
from fedrec.runtime.ragged import spans

Sparse: TypeAlias = Any
"""A `scipy.sparse.csr_array`; according to scipy's annotations its shape may be unknown."""


@dataclass(frozen=True, eq=False)
class Histories:
    """Positive items per user, ragged.

    Attributes:
        num_items: size of the catalogue.
        offsets: `int64 [users + 1]`; user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [total]`, each in `[0, num_items)`; may repeat within a user.
        users: `int64 [users]`, distinct: the user numbers in the dataset; None: unknown.
        user_features: side features of all users of the dataset, indexed by the numbers in `users`;
            None: unknown.
        item_features: side features of the items; None: unknown.
        low_rated: rated items of the same users that are not positive; None: unknown.
        times: `int64 [total]`, sort keys of each user's entries of `items`; None: already sorted.
    """

    num_items: int
    offsets: np.ndarray
    items: np.ndarray
    users: np.ndarray | None = None
    user_features: FeatureTable | None = None
    item_features: FeatureTable | None = None
    low_rated: Histories | None = None
    times: np.ndarray | None = None

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.offsets) - 1

    @property
    def numbers(self) -> np.ndarray:
        """User numbers in the dataset, `int64 [users]`, -1 if unknown."""
        return np.full(self.num_users, -1) if self.users is None else self.users

    def schema(self) -> Schema:
        """Catalogue and features of these users and items, as a model needs them."""
        features = () if self.users is None else (self.user_features or FeatureTable(0)).features
        return Schema(
            self.num_items,
            self.item_features or FeatureTable(self.num_items),
            tuple((feature.name, len(feature.categories)) for feature in features),
            "ranking",
        )

    def codes(self, schema: Schema, numbers: np.ndarray) -> list[np.ndarray]:
        """Category codes of users, `int64 [users, width]` for each user feature of the schema; -1
        if a user has no category or its number in `numbers`, `int64 [users]`, is -1."""
        if self.user_features is None:
            return [np.full((len(numbers), 1), -1) for _ in schema.user_features]
        tables = [self.user_features[name].padded() for name, _ in schema.user_features]
        return [np.where(numbers[:, None] < 0, -1, table[numbers]) for table in tables]

    def rows(self) -> np.ndarray:
        """User of each entry of `items`, `int64 [total]`."""
        return np.repeat(np.arange(self.num_users), np.diff(self.offsets))

    def block(self, start: int, stop: int) -> Histories:
        """Return users `start` to `stop - 1`."""
        return self.take(np.arange(start, min(stop, self.num_users)))

    def take(self, positions: np.ndarray) -> Histories:
        """Return the users at the given positions `int64 [n]`, in that order."""
        counts = np.diff(self.offsets)[positions]
        entries = spans(self.offsets[positions], counts)
        return replace(
            self,
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            items=self.items[entries],
            users=None if self.users is None else self.users[positions],
            low_rated=None if self.low_rated is None else self.low_rated.take(positions),
            times=None if self.times is None else self.times[entries],
        )

    def in_order(self) -> Histories:
        """Return the same users with their items sorted by time; items with equal or unknown times
        keep their order."""
        if self.times is None:
            return self
        order = np.lexsort((self.times, self.rows()))
        return replace(self, items=self.items[order], times=self.times[order])

    def only(self, items: np.ndarray) -> Histories:
        """Restrict the histories to distinct `items`, `int64 [n]`, renumbered by their position
        there; without features of users and items."""
        positions = np.full(self.num_items, -1)
        positions[items] = np.arange(len(items))
        renumbered = positions[self.items]
        listed = renumbered >= 0
        counts = np.bincount(self.rows()[listed], minlength=self.num_users)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Histories(len(items), offsets, renumbered[listed])

    def sums(self, rows: torch.Tensor, low_rated: float = 0.0) -> torch.Tensor:
        """Sum of the rows `float [items, width]` of each user's distinct items, `[users, width]`,
        with the weights of `csr`."""
        table = self.csr(low_rated=low_rated)
        arrays = table.indices.astype(np.int64), table.indptr[:-1].astype(np.int64), table.data
        items, offsets, weights = (torch.from_numpy(array).to(rows.device) for array in arrays)
        return torch.nn.functional.embedding_bag(
            items, rows, offsets, mode="sum", per_sample_weights=weights.to(rows)
        )

    def positions(self, others: Histories) -> np.ndarray:
        """Position of each of the other users among these, `int64 [others]`; -1 if absent or
        unknown."""
        if self.users is None or others.users is None or not len(self.users):
            return np.full(others.num_users, -1, dtype=np.int64)
        order = np.argsort(self.users)
        ranks = np.searchsorted(self.users, others.users, sorter=order)
        nearest = order[ranks.clip(max=len(order) - 1)]
        return np.where(self.users[nearest] == others.users, nearest, -1)

    def matrix(self) -> torch.Tensor:
        """Binary `float32 [users, items]`; for a block of users only."""
        return torch.from_numpy(self.csr().toarray())

    def distinct(self) -> Histories:
        """Return the same users with each item at most once per user, ascending."""
        liked = self.csr()
        return replace(
            self,
            offsets=liked.indptr.astype(np.int64),
            items=liked.indices.astype(np.int64),
            low_rated=None if self.low_rated is None else self.low_rated.distinct(),
            times=None,
        )

    def csr(self, dtype: type[np.floating] = np.float32, low_rated: float = 0.0) -> Sparse:
        """Sparse matrix `[users, items]` with sorted columns: 1 for liked items, `low_rated`, in
        [0, 1], for other rated items, 0 elsewhere; repeated items count once."""
        ones = np.ones(len(self.items), dtype)
        shape = self.num_users, self.num_items
        liked = sparse.csr_array((ones, self.items, self.offsets), shape, copy=True)
        liked.sum_duplicates()
        liked.data[:] = 1
        if self.low_rated is None or low_rated == 0:
            return liked
        rated = sparse.csr_array(liked.maximum(self.low_rated.csr(dtype) * dtype(low_rated)))
        rated.sort_indices()
        return rated


class TooLarge(ExperimentError):
    """The data are too large for a baseline."""


class Baseline(ABC):
    """A centralised recommender: it sees the data of all training users.

    A built-in has a `name` and lives in `fedrec/baselines/`, its configuration class above it.
    """

    Config: ClassVar[type[Config]] = Config
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    device: torch.device = torch.device("cpu")
    """Device for computations, set before `fit`; scores may be on it. Systems without torch ignore
    it."""
    ordered: bool = False
    """Whether it needs the order of users' items: its histories have times, as the data must."""
    transductive: bool = False
    """Whether the baseline is also fitted to the known items of the evaluated users."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def features_used(cls, config: Any, known: FeatureNames) -> FeatureNames:
        """Side features that the baseline uses, for tables of results; none by default."""
        return FeatureNames()

    @abstractmethod
    def fit(self, histories: Histories) -> None:
        """Learn from the positive items of the training users.

        Raises:
            TooLarge: the data are too large for this baseline, which is then left out.
        """

    @abstractmethod
    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores `float32 [users, items]` for a block of users, given by their known liked
        items."""

    def stated(self) -> Stated | None:
        """Stated and exact privacy guarantee after fitting; None without differential privacy."""
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
    """A centralised predictor of ratings, without rankings."""

    @abstractmethod
    def fit_ratings(self, ratings: Ratings) -> None:
        """Learn from the ratings of the training users."""

    @abstractmethod
    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`.

        Args:
            known: training ratings of the users to predict for.
            users: `int64 [rows]`, user numbers as in `known`.
            items: `int64 [rows]`.
        """

    def fit(self, histories: Histories) -> None:
        """Raise an error: predictors of ratings do not rank items.

        Raises:
            ExperimentError: always.
        """
        raise ExperimentError(
            f"baseline {type(self).__name__!r} predicts ratings and does not rank items",
            fix="leave it out of evaluation.baselines, or set task = 'rating'",
        )

    def scores(self, histories: Histories) -> torch.Tensor:
        raise NotImplementedError("Expected a baseline that ranks.")
