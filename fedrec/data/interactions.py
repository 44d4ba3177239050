# SPDX-License-Identifier: Apache-2.0
"""Interactions (the data type of all datasets), their schema and their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import Field

from fedrec.config import Config
from fedrec.data.features import FeatureTable
from fedrec.errors import DataError, ExperimentError
from fedrec.rng import hashed, mixed
from fedrec.runtime.ragged import are_distinct, spans, within_groups

_COLUMNS = {
    "users": np.int64,
    "items": np.int64,
    "ratings": np.float32,
    "times": np.int64,
    "published_test": bool,
}


@dataclass(frozen=True, eq=False)
class Interactions:
    """Interactions between users and items, validated and immutable.

    Users and items are dense indices `0..users-1` and `0..items-1`; `user_ids` and `item_ids` are
    the names in the source. Rows keep the order of the source. The same pair may occur in several
    rows (repeated use).

    Attributes:
        name: the dataset's name.
        users: `int64 [rows]`, each in `[0, num_users)`.
        items: `int64 [rows]`, each in `[0, num_items)`.
        user_ids: `[num_users]`, the source's names of the users, distinct.
        item_ids: `[num_items]`, the source's names of the items, distinct.
        user_features: side features, one row per user.
        item_features: side features, one row per item.
        ratings: `float32 [rows]`, finite, or None when the source has no ratings.
        times: `int64 [rows]`, numbers that order a user's interactions (seconds since 1970 of the
            built-in datasets, nanoseconds of a user's own table), or None.
        published_test: `bool [rows]`, the rows that the publisher holds out for testing, or None
            where it has no such file.

    Raises:
        DataError: lengths differ, an index is out of range, a rating is not finite, or an id is
            duplicate.
    """

    name: str
    users: np.ndarray
    items: np.ndarray
    user_ids: np.ndarray
    item_ids: np.ndarray
    user_features: FeatureTable
    item_features: FeatureTable
    ratings: np.ndarray | None = None
    times: np.ndarray | None = None
    published_test: np.ndarray | None = None

    def __post_init__(self) -> None:
        for column, kind in _COLUMNS.items():
            values = getattr(self, column)
            if values is None:
                continue
            values = np.ascontiguousarray(values, dtype=kind)
            values.setflags(write=False)
            object.__setattr__(self, column, values)
            if len(values) != len(self.users):
                raise self._wrong(f"column {column!r} does not have {len(self.users)} values")
        for what, index, ids, features in (
            ("users", self.users, self.user_ids, self.user_features),
            ("items", self.items, self.item_ids, self.item_features),
        ):
            ids.setflags(write=False)
            if len(index) and not (index.min() >= 0 and index.max() < len(ids)):
                raise self._wrong(f"an index in {what!r} is not in [0, {len(ids)})")
            if features.rows != len(ids):
                raise self._wrong(f"features of {what} do not have {len(ids)} rows")
            if not are_distinct(ids):
                raise self._wrong(f"duplicate ids of {what}")
        if self.ratings is not None and not np.isfinite(self.ratings).all():
            raise self._wrong("a rating is not finite")

    def _wrong(self, problem: str) -> DataError:
        return DataError(
            f"{self.name}: {problem}",
            fix="correct the reader: use index_rows for ids and indices, one value per row in each"
            " column, and one row of features per user or item",
        )

    def __len__(self) -> int:
        return len(self.users)

    @property
    def num_users(self) -> int:
        """Number of users, including those without interactions."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """Number of items in the catalogue, including those without interactions."""
        return len(self.item_ids)

    @property
    def pairs(self) -> np.ndarray:
        """Number of each row's pair of user and item, `int64 [rows]`."""
        return self.users * self.num_items + self.items

    @cached_property
    def user_order(self) -> np.ndarray:
        """Row numbers grouped by user, `int64 [rows]`: users ascending, each user's rows in the
        source's order."""
        return np.argsort(self.users, kind="stable")

    @cached_property
    def user_offsets(self) -> np.ndarray:
        """Offsets `int64 [num_users + 1]`: user u's rows are
        `user_order[user_offsets[u]:user_offsets[u + 1]]`."""
        counts = np.bincount(self.users, minlength=self.num_users)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def rows_of(self, user: int) -> np.ndarray:
        """Row numbers of one user, `int64 [n]`, in the source's order."""
        return self.user_order[self.user_offsets[user] : self.user_offsets[user + 1]]

    def fingerprint(self) -> str:
        """SHA-256 of the set of (user id, item id, rating) rows, independent of row order, times
        and machine."""
        ratings = self.ratings if self.ratings is not None else np.zeros(1, np.float32)
        # adding zero turns -0 into 0
        bits = (ratings + np.float32(0)).view(np.uint32).astype(np.uint64)
        # mixed after each column, so that XOR of columns cannot cancel
        rows = mixed(hashed(self.user_ids.tolist())[self.users])
        rows = mixed(rows ^ hashed(self.item_ids.tolist())[self.items])
        rows = np.sort(mixed(rows ^ bits))
        return hashlib.sha256(rows.astype("<u8", copy=False).tobytes()).hexdigest()

    def with_rows(self, rows: np.ndarray | slice) -> Interactions:
        """Return selected rows (row numbers `int64 [n]`, or a slice), in that order, with the same
        users and items."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return replace(self, **{n: v[rows] for n, v in columns.items() if v is not None})

    def frame(self) -> pd.DataFrame:
        """Return the rows as a data frame with the source's ids: user, item, and rating and time
        if present."""
        columns = {"user": self.user_ids[self.users], "item": self.item_ids[self.items]}
        if self.ratings is not None:
            columns["rating"] = self.ratings
        if self.times is not None:
            columns["time"] = self.times
        return pd.DataFrame(columns)


def more_ids(ids: np.ndarray, count: int, word: str) -> np.ndarray:
    """Append `count` new ids to ids `[n]`: further numbers, or `word-0`, `word-1` and so on."""
    if np.issubdtype(ids.dtype, np.integer):
        return np.concatenate([ids, ids.max(initial=-1) + 1 + np.arange(count)])
    taken = set(map(str, ids.tolist()))
    free = [name for number in range(len(ids) + count) if (name := f"{word}-{number}") not in taken]
    kind = object if ids.dtype == object else np.str_
    return np.concatenate([ids, np.array(free[:count], dtype=kind)])


def no_times(name: str, what: str) -> DataError:
    """Create the error for interactions without times; `what` is the predicate after `name`."""
    return DataError(
        f"{name} {what}",
        expected="a column of times",
        got="interactions without one",
        fix="name the column of times of a table with dataset.time (fedrec run --data: --time), or"
        " set split.order = 'random' and leave out systems that need times",
    )


# Weights of the items of a user by their times.
#
# An item that a user rated several times has one number (Fang et al. 2022, section 3.2):
#
#     R_ki = sum over t = 1..m of r_ki^t * 2 t / (m (m + 1))
#
# with the ratings in the order of their times, so that later ones count more; the weights add up to
# 1. Without ratings every r is 1, and so is R.
#
# For what comes next, the last items of a user's sequence count, the later ones more.


class RecencyConfig(Config):
    """Settings of the weights of a sequence's items by their distance."""

    window: int = Field(default=10, ge=1)
    """Largest distance, in positions, between two items of a transition, and number of last items
    used for a score."""
    decay: float = Field(default=0.8, gt=0, le=1)
    """Factor by which the weight decreases with each further position, in (0, 1]."""


def time_weighted(
    users: np.ndarray, items: np.ndarray, ratings: np.ndarray | None, times: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the time-weighted rating R of every pair of user and item.

    Args:
        users: `int64 [rows]`.
        items: `int64 [rows]`.
        ratings: `float [rows]`; None: 1 each.
        times: `int64 [rows]`; None: the rows are in order. Rows of equal times keep their order.

    Returns:
        Users and items of the pairs, `int64 [pairs]`, ascending, and R, `float32 [pairs]`.
    """
    if not len(users):
        return users, items, np.zeros(0, dtype=np.float32)
    order = np.lexsort((np.arange(len(users)) if times is None else times, items, users))
    pairs = np.stack([users[order], items[order]])
    first = np.concatenate([[True], (pairs[:, 1:] != pairs[:, :-1]).any(0)])
    pair = np.cumsum(first) - 1
    counts = np.bincount(pair)
    rank = within_groups(counts) + 1
    weights = 2 * rank / (counts * (counts + 1))[pair]
    values = np.ones(len(pair)) if ratings is None else ratings[order].astype(np.float64)
    return pairs[0, first], pairs[1, first], np.bincount(pair, weights * values).astype(np.float32)


def recent_weights(
    offsets: np.ndarray, items: np.ndarray, num_items: int, recency: RecencyConfig
) -> np.ndarray:
    """Compute the weight of each item for predicting the next, `float32 [users, items]`:
    decay^(d - 1) for the d-th item from the end of a user's sequence, d up to the window (the later
    position if an item is repeated); 0 for all others.

    Args:
        offsets: `int64 [users + 1]`: user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [n]`, each user's from the earliest to the latest.
        num_items: size of the catalogue.
        recency: window and decay.
    """
    table = np.zeros((len(offsets) - 1, num_items), dtype=np.float32)
    ends = offsets[1:]
    for distance in range(recency.window, 0, -1):
        index = ends - distance
        users = np.flatnonzero(index >= offsets[:-1])
        table[users, items[index[users]]] = recency.decay ** (distance - 1)
    return table


def last_items(offsets: np.ndarray, items: np.ndarray, length: int) -> np.ndarray:
    """Each user's last items, `int64 [users, length]`, from the earliest to the latest, padded with
    -1.

    Args:
        offsets: `int64 [users + 1]`: user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [n]`, each user's from the earliest to the latest.
        length: largest number of items per user.
    """
    table = np.full((len(offsets) - 1, length), -1, dtype=np.int64)
    counts = np.minimum(np.diff(offsets), length)
    table[np.arange(length) < counts[:, None]] = items[spans(offsets[1:] - counts, counts)]
    return table


@dataclass(frozen=True)
class Schema:
    """Public properties of the data that a model is built from.

    Attributes:
        num_items: size of the catalogue.
        item_features: public side features of the items.
        user_features: names of the users' features and their number of categories, in order.
        task: `"ranking"` (labels 0 and 1) or `"rating"` (labels are ratings).
        num_users: number of user ids; for models that know users by id.
        user_words: labels of the categories of each of the users' features, in order.
    """

    num_items: int
    item_features: FeatureTable
    user_features: tuple[tuple[str, int], ...]
    task: Literal["ranking", "rating"]
    num_users: int = 0
    user_words: tuple[tuple[str, ...], ...] = ()

    def described(self, names: Sequence[str] = ()) -> tuple[list[int], list[tuple[str, ...]]]:
        """Positions of the named user features (no names: all), and the labels of the categories
        of each.

        Raises:
            ExperimentError: a feature is unknown, or users have no features.
        """
        known = [name for name, _ in self.user_features]
        unknown = [name for name in names if name not in known]
        if unknown or not known or len(self.user_words) != len(known):
            raise ExperimentError(
                "unknown or missing user features",
                expected=", ".join(names) or "features of the users",
                got=", ".join(known) or "users without features",
                fix="name features of the dataset, or choose a dataset with features of users",
            )
        positions = [known.index(name) for name in names or known]
        return positions, [self.user_words[position] for position in positions]


# The setting of systems that count rated items that are not positive, with a smaller weight than
# positive ones.
#
# A user chose the items that it rated, which tells something about its preferences even where it
# does not like them. Only known rows have a weight: held-out rows that are not positive stay
# unknown, and all items that are not positive are ranked as before.


class LowRatedConfig(Config):
    """Settings of the weights in a user's history."""

    low_rated: float = Field(default=0.0, ge=0, le=1)
    """Weight of rated but non-positive items in a user's history, where positive items have 1; 0
    leaves them out. Without effect if the data have no ratings."""
