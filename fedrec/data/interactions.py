# SPDX-License-Identifier: Apache-2.0
"""The data type of all datasets: users, items, ratings and times of interactions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedrec.data.features import FeatureTable
from fedrec.errors import DataError
from fedrec.rng import hashed, mixed
from fedrec.runtime.grouping import are_distinct

if TYPE_CHECKING:
    import pandas as pd


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
        second: how much one second is in `times`: 10^9 in own tables, whose times are nanoseconds.
        published_test: `bool [rows]`, the rows that the publisher holds out for testing, or None
            where it has no such file.

    Raises:
        DataError: lengths differ, an index is out of range, a rating is not finite, or a name is
            given twice.
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
    second: int = 1

    def __post_init__(self) -> None:
        columns = {
            "users": np.int64,
            "items": np.int64,
            "ratings": np.float32,
            "times": np.int64,
            "published_test": bool,
        }
        for column, dtype in columns.items():
            values = getattr(self, column)
            if values is None:
                continue
            values = np.ascontiguousarray(values, dtype=dtype)
            values.setflags(write=False)
            object.__setattr__(self, column, values)
            if len(values) != len(self.users):
                raise DataError(
                    f"{self.name}: column {column!r} has the wrong length",
                    expected=f"{len(self.users)} values",
                    got=f"{len(values)} values",
                    fix="correct the reader: all columns have one value a row",
                )
        for names in (self.user_ids, self.item_ids):
            names.setflags(write=False)
        self._check_indices("users", self.users, self.user_ids, self.user_features)
        self._check_indices("items", self.items, self.item_ids, self.item_features)
        if self.ratings is not None and not np.isfinite(self.ratings).all():
            raise DataError(
                f"{self.name}: a rating is not finite",
                expected="finite numbers",
                got="NaN or infinity",
                fix="correct the reader: all columns have one value a row",
            )

    def _check_indices(
        self, what: str, index: np.ndarray, ids: np.ndarray, features: FeatureTable
    ) -> None:
        if len(index) and not (index.min() >= 0 and index.max() < len(ids)):
            raise DataError(
                f"{self.name}: an index in {what!r} is out of range",
                expected=f"indices in [0, {len(ids)})",
                got=f"indices from {index.min()} to {index.max()}",
                fix="correct the reader: index_rows makes such indices of ids",
            )
        if features.rows != len(ids):
            raise DataError(
                f"{self.name}: features of {what} do not match",
                expected=f"{len(ids)} rows",
                got=f"{features.rows} rows",
                fix="correct the reader: a feature has a row for each user or item",
            )
        if not are_distinct(ids):
            raise DataError(
                f"{self.name}: two {what} have one id",
                expected="distinct ids",
                got="a repeated id",
                fix="correct the reader: index_rows makes distinct ids",
            )

    def __len__(self) -> int:
        return len(self.users)

    @property
    def num_users(self) -> int:
        """Number of users, those without an interaction included."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """Number of items in the catalogue, those without an interaction included."""
        return len(self.item_ids)

    @cached_property
    def user_order(self) -> np.ndarray:
        """`int64 [rows]`: row numbers grouped by user, users ascending, each user's rows in the
        source's order."""
        return np.argsort(self.users, kind="stable")

    @cached_property
    def user_offsets(self) -> np.ndarray:
        """`int64 [num_users + 1]`: user u's rows are
        `user_order[user_offsets[u]:user_offsets[u + 1]]`."""
        counts = np.bincount(self.users, minlength=self.num_users)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def rows_of(self, user: int) -> np.ndarray:
        """Row numbers of one user, `int64 [n]`, in the source's order."""
        return self.user_order[self.user_offsets[user] : self.user_offsets[user + 1]]

    def fingerprint(self) -> str:
        """SHA-256 over the set of (user id, item id, rating) rows: the same for any row order,
        times and machine."""
        ratings = self.ratings if self.ratings is not None else np.zeros(1, np.float32)
        # adding zero makes -0 and 0 one number
        bits = (ratings + np.float32(0)).view(np.uint32).astype(np.uint64)
        # mixed after each column, so that XOR of columns cannot cancel
        rows = mixed(hashed(self.user_ids.tolist())[self.users])
        rows = mixed(rows ^ hashed(self.item_ids.tolist())[self.items])
        rows = np.sort(mixed(rows ^ bits))
        return hashlib.sha256(rows.astype("<u8", copy=False).tobytes()).hexdigest()

    def with_rows(self, rows: np.ndarray | slice) -> Interactions:
        """Some of the rows (row numbers `int64 [n]`, or a slice), in that order; users and items
        keep their numbers."""
        columns = {
            name: getattr(self, name)
            for name in ("users", "items", "ratings", "times", "published_test")
        }
        return replace(
            self, **{name: values[rows] for name, values in columns.items() if values is not None}
        )

    def frame(self) -> pd.DataFrame:
        """The rows as a table with the source's names: user, item, and rating and time where there
        are any."""
        import pandas as pd

        columns = {"user": self.user_ids[self.users], "item": self.item_ids[self.items]}
        if self.ratings is not None:
            columns["rating"] = self.ratings
        if self.times is not None:
            columns["time"] = self.times
        return pd.DataFrame(columns)


def more_ids(ids: np.ndarray, count: int, word: str) -> np.ndarray:
    """Names `[n]` with `count` new ones behind them: further numbers, or `word-0`, `word-1` and so
    on."""
    if np.issubdtype(ids.dtype, np.integer):
        return np.concatenate([ids, ids.max(initial=-1) + 1 + np.arange(count)])
    taken = set(map(str, ids.tolist()))
    free = [name for number in range(len(ids) + count) if (name := f"{word}-{number}") not in taken]
    kind = object if ids.dtype == object else np.str_
    return np.concatenate([ids, np.array(free[:count], dtype=kind)])


def no_times(name: str, what: str) -> DataError:
    """The error where the order of items is needed: `what` the interactions of this name do not
    allow."""
    return DataError(
        f"{name} {what}",
        expected="a column of times",
        got="interactions without one",
        fix="name the column of times of a table with dataset.time (fedrec run --data: --time), or"
        " choose a random order, and systems that need none",
    )
