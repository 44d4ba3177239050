# SPDX-License-Identifier: Apache-2.0
"""Rows of interactions grouped by user, so that those of some users are found at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedrec.data.interactions import Interactions


@dataclass(frozen=True, eq=False)
class UserRows:
    """Rows of some users.

    Attributes:
        data: the dataset.
        all_labels: `float32 [all rows]`, labels of the dataset's rows.
        place: `int64 [rows]`, ascending: position of each row's user among the users.
        rows: `int64 [rows]`, row numbers in the dataset.
    """

    data: Interactions
    all_labels: np.ndarray
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
        return self.all_labels[self.rows]

    @property
    def ratings(self) -> np.ndarray | None:
        """`float32 [rows]`; None without ratings."""
        return None if self.data.ratings is None else self.data.ratings[self.rows]

    @property
    def times(self) -> np.ndarray | None:
        """`int64 [rows]`; None without times."""
        return None if self.data.times is None else self.data.times[self.rows]

    def where(self, chosen: np.ndarray) -> UserRows:
        """Some of the rows, `bool [rows]`."""
        return replace(self, place=self.place[chosen], rows=self.rows[chosen])


class GroupedRows:
    """A selection of the rows of interactions, grouped by user.

    Args:
        interactions: the dataset.
        labels: `float32 [all rows]`.
        rows: `int64 [n]`, row numbers; None: all rows.
    """

    def __init__(
        self, interactions: Interactions, labels: np.ndarray, rows: np.ndarray | None = None
    ) -> None:
        users = interactions.users if rows is None else interactions.users[rows]
        self._data = interactions
        self._labels = labels
        self._rows = rows  # None: the rows of the data are grouped already
        if (users[1:] < users[:-1]).any():
            order = np.argsort(users, kind="stable")
            self._rows = order if rows is None else rows[order]
        counts = np.bincount(users, minlength=interactions.num_users)
        self._offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def counts(self, users: np.ndarray) -> np.ndarray:
        """`int64 [users]`: number of selected rows of some users."""
        return self._offsets[users + 1] - self._offsets[users]

    def of(self, users: np.ndarray) -> UserRows:
        """The selected rows of some users `int64 [users]`."""
        counts = self.counts(users)
        place = np.repeat(np.arange(len(users)), counts)
        within = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(self._offsets[users], counts) + within
        if self._rows is not None:
            rows = self._rows[rows]
        return UserRows(self._data, self._labels, place, rows)
