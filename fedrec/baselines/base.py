# SPDX-License-Identifier: Apache-2.0
"""The interface of centralised recommenders, and how their native code is compiled and run in
threads."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from fedrec.config import Config
from fedrec.data.features import FeatureNames, FeatureTable
from fedrec.data.interactions import Schema
from fedrec.errors import ExperimentError
from fedrec.privacy.statement import Stated
from fedrec.runtime.ragged import spans

# The interface of centralised recommenders, the baselines of the federated ones.

Sparse: TypeAlias = Any
"""A `scipy.sparse.csr_array`; according to scipy's annotations its shape may be unknown."""


@dataclass(frozen=True, eq=False)
class Histories:
    """Positive items per user, ragged.

    Attributes:
        num_items: size of the catalogue.
        offsets: `int64 [users + 1]`; user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [total]`, each in `[0, num_items)`; may repeat within a user.
        users: `int64 [users]`, distinct: the user number in the dataset of each one; None: unknown.
        user_features: side features of all users of the dataset, indexed by the numbers in `users`;
            None: unknown.
        item_features: side features of the items; None: unknown.
        low_rated: for the same users, the items that they rated and that are not positive; None:
            unknown.
        times: `int64 [total]`, numbers that order each user's entries of `items`; None: they are in
            order.
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
        """`int64 [users]`: the users' numbers in the dataset, -1 where they are unknown."""
        return np.full(self.num_users, -1) if self.users is None else self.users

    def schema(self) -> Schema:
        """What a model may know of these users and items before training."""
        described = None if self.users is None else self.user_features
        users = described.features if described else ()
        return Schema(
            self.num_items,
            self.item_features or FeatureTable(self.num_items),
            tuple((one.name, len(one.categories)) for one in users),
            "ranking",
        )

    def codes(self, schema: Schema, numbers: np.ndarray) -> list[np.ndarray]:
        """Category codes of each of the schema's users' features, `int64 [users, width]`, for users
        of the dataset by their numbers `int64 [users]`; -1 for none, and where a number is."""
        if self.user_features is None:
            return [np.full((len(numbers), 1), -1) for _ in schema.user_features]
        tables = [self.user_features[name].padded() for name, _ in schema.user_features]
        return [np.where(numbers[:, None] < 0, -1, table[numbers]) for table in tables]

    def rows(self) -> np.ndarray:
        """`int64 [total]`: the user of each entry of `items`."""
        return np.repeat(np.arange(self.num_users), np.diff(self.offsets))

    def block(self, start: int, stop: int) -> Histories:
        """Users `start` to `stop - 1`."""
        return self.take(np.arange(start, min(stop, self.num_users)))

    def take(self, places: np.ndarray) -> Histories:
        """The users at some places `int64 [n]`, in that order."""
        counts = np.diff(self.offsets)[places]
        taken = spans(self.offsets[places], counts)
        users = None if self.users is None else self.users[places]
        return replace(
            self,
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            items=self.items[taken],
            users=users,
            low_rated=None if self.low_rated is None else self.low_rated.take(places),
            times=None if self.times is None else self.times[taken],
        )

    def in_order(self) -> Histories:
        """The same users with their items from the earliest to the latest; items of equal times,
        and of unknown ones, in their present order."""
        if self.times is None:
            return self
        order = np.lexsort((self.times, self.rows()))
        return replace(self, items=self.items[order], times=self.times[order])

    def among(self, items: np.ndarray) -> Histories:
        """The users' items that are among `items`, `int64 [n]`, distinct, numbered by their place
        there; nothing else is known of users and items."""
        place = np.full(self.num_items, -1)
        place[items] = np.arange(len(items))
        new = place[self.items]
        counts = np.bincount(self.rows()[new >= 0], minlength=self.num_users)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Histories(len(items), offsets, new[new >= 0])

    def sums(self, rows: torch.Tensor, low_rated: float = 0.0) -> torch.Tensor:
        """Sum of the rows `float [items, width]` of each user's distinct items, `[users, width]`,
        with the weights of `csr`."""
        own = self.csr(low_rated=low_rated)
        items, offsets, weights = (
            torch.from_numpy(part).to(rows.device)
            for part in (own.indices.astype(np.int64), own.indptr[:-1].astype(np.int64), own.data)
        )
        return torch.nn.functional.embedding_bag(
            items, rows, offsets, mode="sum", per_sample_weights=weights.to(rows)
        )

    def places(self, others: Histories) -> np.ndarray:
        """`int64 [others]`: the position of each of the other users among these; -1 if absent or
        unknown."""
        if self.users is None or others.users is None or not len(self.users):
            return np.full(others.num_users, -1, dtype=np.int64)
        order = np.argsort(self.users)
        found = order[
            np.searchsorted(self.users, others.users, sorter=order).clip(max=len(order) - 1)
        ]
        return np.where(self.users[found] == others.users, found, -1)

    def matrix(self) -> torch.Tensor:
        """Binary `float32 [users, items]`; for a block of users only."""
        dense = torch.zeros(self.num_users, self.num_items)
        dense[torch.from_numpy(self.rows()), torch.from_numpy(self.items.astype(np.int64))] = 1.0
        return dense

    def distinct(self) -> Histories:
        """The same users with each item at most once per user, ascending."""
        # np.unique would hash: 80 times as long
        keys = np.sort(self.rows() * self.num_items + self.items)
        users, items = np.divmod(keys[np.diff(keys, prepend=-1) > 0], self.num_items)
        counts = np.bincount(users, minlength=self.num_users)
        return replace(
            self,
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            items=items,
            low_rated=None if self.low_rated is None else self.low_rated.distinct(),
            times=None,
        )

    def csr(self, dtype: type[np.floating] = np.float32, low_rated: float = 0.0) -> Sparse:
        """Sparse `[users, items]` with sorted columns: 1 for liked items, `low_rated`, in [0, 1],
        for other rated ones, 0 elsewhere; an item that a user has several times counts once."""
        from scipy import sparse  # slow to import, and not needed without baselines

        once = self.distinct()
        ones = np.ones(len(once.items), dtype)
        shape = self.num_users, self.num_items
        liked = sparse.csr_array((ones, once.items, once.offsets), shape)
        if self.low_rated is None or low_rated == 0:
            return liked
        rated = sparse.csr_array(liked.maximum(self.low_rated.csr(dtype) * dtype(low_rated)))
        rated.sort_indices()
        return rated


class Baseline(ABC):
    """A centralised recommender: it sees the data of all training users.

    A built-in has a `name` and lives in `fedrec/baselines/`, its configuration class above it.

    Attributes:
        stand_in: the baseline to use instead if the data are too large for this one; empty: none.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""
    stand_in: ClassVar[str] = ""
    device: torch.device = torch.device("cpu")
    """Device for its computations, set before `fit`; the scores may be on it. Ignored by systems
    that do not use torch."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def features_used(cls, config: Any, known: FeatureNames) -> FeatureNames:
        """Which of the data's side features it uses; none by default. Tables of results state
        it."""
        return FeatureNames()

    @property
    def ordered(self) -> bool:
        """Whether it needs the order of users' items, and refuses data without times; no by
        default."""
        return False

    @property
    def transductive(self) -> bool:
        """Whether it must also be fitted to the known items of the evaluated users."""
        return False

    def too_large(self, num_users: int, num_items: int) -> str:
        """The reason why data of this size cannot be fitted; empty if they can."""
        return ""

    @abstractmethod
    def fit(self, histories: Histories) -> None:
        """Learn from the positive items of the training users."""

    @abstractmethod
    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores `float32 [users, items]` for a block of users, given by their known liked
        items."""

    def stated(self) -> Stated | None:
        """Its stated and exact privacy after fitting; None for systems without privacy."""
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
            known: the known ratings of the users to predict for: those of their training rows.
            users: `int64 [rows]`, user numbers as in `known`.
            items: `int64 [rows]`.
        """

    def fit(self, histories: Histories) -> None:
        """Not available for predictors of ratings.

        Raises:
            ExperimentError: it needs ratings.
        """
        raise ExperimentError(
            f"baseline {type(self).__name__!r} predicts ratings and does not rank items",
            expected="task = 'rating'",
            got="task = 'ranking'",
            fix="leave it out of evaluation.baselines",
        )

    def scores(self, histories: Histories) -> torch.Tensor:
        raise NotImplementedError("Expected a baseline that ranks.")


# Native code of centralised systems: compiled when it is first called, on rows in threads.


def native(**flags: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that Numba compiles at its first call: importing Numba is slow, and not
    needed to read settings.

    Args:
        flags: of `numba.njit`.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def code() -> Any:
            from fedrec.kernel.compiled import compiled

            return compiled(function, flags)

        return functools.wraps(function)(lambda *given: code()(*given))

    return decorated


def pointers(table: Sparse) -> tuple[np.ndarray, np.ndarray]:
    """Where each row begins, `int64 [rows + 1]`, and its columns, `int64 [entries]`: native code is
    compiled for each type."""
    return table.indptr.astype(np.int64, copy=False), table.indices.astype(np.int64, copy=False)


def over_rows(
    function: Callable[..., Any], given: tuple[Any, ...], bounds: np.ndarray, found: np.ndarray
) -> np.ndarray:
    """Rows `found`, which native code writes in a thread for each part of them.

    Args:
        function: takes `given`, the first row, the row after the last, and `found`.
        given: its first arguments.
        bounds: ascending, `int64 [threads + 1]`, rows between the parts.
        found: `[rows, ...]`.
    """
    function(*given, 0, 0, found)  # compiled by one thread
    with ThreadPoolExecutor(len(bounds) - 1) as pool:
        list(pool.map(lambda part: function(*given, *part, found), pairwise(bounds.tolist())))
    return found
