# SPDX-License-Identifier: Apache-2.0
"""Rows of interactions grouped by user, so that those of some users are found at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedrec.data.interactions import Interactions
from fedrec.data.time_order import TimeOrder
from fedrec.runtime.grouping import spans

_AT_ONCE = 2**22  # rows, whose users are not in memory a second time


@dataclass(frozen=True, eq=False)
class UserRows:
    """Rows of some users.

    Attributes:
        data: the dataset.
        all_labels: `float32` or `bool [all rows]`, labels of the dataset's rows.
        order: of each user's rows.
        place: `int64 [rows]`, ascending: position of each row's user among the users.
        rows: `int64 [rows]`, row numbers in the dataset.
    """

    data: Interactions
    all_labels: np.ndarray
    order: TimeOrder
    place: np.ndarray
    rows: np.ndarray

    @property
    def users(self) -> np.ndarray:
        """`int64 [rows]`."""
        return self.data.users[self.rows]

    @property
    def items(self) -> np.ndarray:
        """`int64 [rows]`."""
        return self.data.items[self.rows]

    @property
    def labels(self) -> np.ndarray:
        """`float32 [rows]`."""
        return self.all_labels[self.rows].astype(np.float32, copy=False)

    @property
    def ratings(self) -> np.ndarray | None:
        """`float32 [rows]`; None without ratings."""
        return None if self.data.ratings is None else self.data.ratings[self.rows]

    @property
    def times(self) -> np.ndarray | None:
        """`int64 [rows]`: positions in the users' sequences; None without times."""
        return None if self.data.times is None else self.order.positions[self.rows]

    def where(self, chosen: np.ndarray) -> UserRows:
        """Some of the rows, `bool [rows]`."""
        return replace(self, place=self.place[chosen], rows=self.rows[chosen])


class GroupedRows:
    """A selection of the rows of interactions, grouped by user.

    Args:
        interactions: the dataset.
        labels: `float32` or `bool [all rows]`.
        order: of each user's rows.
        rows: `int64 [n]`, row numbers; None: all rows.
    """

    def __init__(
        self,
        interactions: Interactions,
        labels: np.ndarray,
        order: TimeOrder,
        rows: np.ndarray | None = None,
    ) -> None:
        self._data = interactions
        self._labels = labels
        self._order = order
        self._rows = rows  # None: the rows of the data are grouped already
        counts = np.zeros(interactions.num_users, dtype=np.int64)
        last = 0
        grouped = True
        for start in range(0, self._number, _AT_ONCE):
            users = self._users(slice(start, start + _AT_ONCE))
            grouped = grouped and users[0] >= last and not (users[1:] < users[:-1]).any()
            last = users[-1]
            counts += np.bincount(users, minlength=len(counts))
        if not grouped:
            by_user = np.argsort(self._users(slice(None)), kind="stable")
            self._rows = by_user if rows is None else rows[by_user]
        self._offsets = np.concatenate([[0], np.cumsum(counts)])

    @property
    def _number(self) -> int:
        return len(self._data) if self._rows is None else len(self._rows)

    def _users(self, part: slice) -> np.ndarray:
        """Users of some of the selected rows."""
        return self._data.users[part if self._rows is None else self._rows[part]]

    def counts(self, users: np.ndarray) -> np.ndarray:
        """`int64 [users]`: number of selected rows of some users."""
        return self._offsets[users + 1] - self._offsets[users]

    def of(self, users: np.ndarray) -> UserRows:
        """The selected rows of some users `int64 [users]`."""
        counts = self.counts(users)
        place = np.repeat(np.arange(len(users)), counts)
        rows = spans(self._offsets[users], counts)
        if self._rows is not None:
            rows = self._rows[rows]
        return UserRows(self._data, self._labels, self._order, place, rows)
