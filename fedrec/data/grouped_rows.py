# SPDX-License-Identifier: Apache-2.0
"""Rows of interactions grouped by user, so that those of some users are found at once."""

from __future__ import annotations

import numpy as np

from fedrec.data.interactions import Interactions


class GroupedRows:
    """A selection of the rows of interactions, grouped by user.

    Args:
        interactions: the dataset.
        rows: `int64 [n]`, row numbers; None: all rows.

    Attributes:
        offsets: `int64 [users + 1]`: user u has as many selected rows as lie between `offsets[u]`
            and `offsets[u + 1]`.
    """

    def __init__(self, interactions: Interactions, rows: np.ndarray | None) -> None:
        selected = np.arange(len(interactions)) if rows is None else rows
        users = interactions.users[selected]
        order = np.argsort(users, kind="stable")
        self._items = interactions.items
        self._rows = selected[order]
        counts = np.bincount(users, minlength=interactions.num_users)
        self.offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def counts(self, users: np.ndarray) -> np.ndarray:
        """`int64 [users]`: number of selected rows of some users."""
        return self.offsets[users + 1] - self.offsets[users]

    def rows_of(self, user: int) -> np.ndarray:
        """`int64 [n]`: numbers of a user's selected rows."""
        return self._rows[self.offsets[user] : self.offsets[user + 1]]

    def entries(self, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Place in `users` and row number of every selected row of these users, `int64 [n]`
        each."""
        counts = self.counts(users)
        place = np.repeat(np.arange(len(users)), counts)
        within = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        return place, self._rows[np.repeat(self.offsets[users], counts) + within]

    def positions(self, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Place in `users` and item of every selected row of these users, `int64 [n]` each."""
        place, rows = self.entries(users)
        return place, self._items[rows]
