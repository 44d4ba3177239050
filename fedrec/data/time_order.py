# SPDX-License-Identifier: Apache-2.0
"""Rows of users: their order by time, their groups, and random numbers that no other user's data
change."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedrec.data.interactions import Interactions, no_times
from fedrec.rng import hashed, mixed, seed_sequence
from fedrec.runtime.ragged import spans, within_groups

# Random numbers of users and of their rows that no other user's data change.
#
# Numbers that are drawn for all rows from one stream are others for everybody when one user has a
# row more or less. These are hashes: of the seed, the user's name and, for a row, its position
# among the user's own.

_SHIFT = np.uint64(32)  # the upper half of a hash is the number


def row_numbers(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    """A random number in [0, 2^32) of each row, `int64 [rows]`.

    Args:
        interactions: the rows.
        seed: of the experiment.
        name: of the stream, see `fedrec.rng.stream`.
        address: of the stream.
    """
    position = np.empty(len(interactions), dtype=np.uint64)
    position[interactions.user_order] = within_groups(np.diff(interactions.user_offsets))
    users = _user_hashes(interactions, seed, name, *address)
    return (mixed(users[interactions.users] + position) >> _SHIFT).astype(np.int64)


def pair_numbers(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    """A random number in [0, 2^32) of each row's user and item, `int64 [rows]`, whatever the order
    of the rows; arguments as of `row_numbers`."""
    users = _user_hashes(interactions, seed, name, *address)
    items = hashed(interactions.item_ids.tolist())
    numbers = mixed(users[interactions.users] + items[interactions.items])
    return (numbers >> _SHIFT).astype(np.int64)


def user_shares(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    """A random number in [0, 1) of each user, `float64 [users]`; arguments as of `row_numbers`."""
    return (_user_hashes(interactions, seed, name, *address) >> _SHIFT) / 2.0**32


def item_shares(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    """A random number in [0, 1) of each item, `float64 [items]`, by its id; arguments as of
    `row_numbers`."""
    return (_hashes(interactions.item_ids, seed, name, *address) >> _SHIFT) / 2.0**32


def _user_hashes(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    return _hashes(interactions.user_ids, seed, name, *address)


def _hashes(ids: np.ndarray, seed: int, name: str, *address: int) -> np.ndarray:
    salt = seed_sequence(seed, name, *address).generate_state(1, np.uint64)
    return mixed(hashed(ids.tolist()) ^ salt)


# Each user's rows in the order of their times; the seed decides the order of rows of one time.
#
# Exports list the rows of one day or second by item, or by popularity. If rows of equal times kept
# the order of their file, then systems that know what came last would learn that order, and a split
# by time would test the items that the file lists last. So such rows have an order that follows
# from a hash of the seed, the user's name and the item's name: it is the same for any order of the
# lines, and no other user's rows change it.

log = logging.getLogger("fedrec.data")

_LEAST_SHARE = 0.0005  # smallest share that is reported, a tenth of a percent when rounded
_TIES = 4  # part of the stream "split", behind those of fedrec.data.splits


class TimeOrder:
    """The order of each user's rows.

    Args:
        interactions: the rows.
        seed: of the split.
    """

    def __init__(self, interactions: Interactions, seed: int) -> None:
        self._interactions = interactions
        self._seed = seed

    @cached_property
    def positions(self) -> np.ndarray:
        """`int64 [rows]`: the position of each row in its user's sequence, from 0.

        Raises:
            DataError: the interactions have no times.
        """
        data = self._interactions
        times = times_of(data)
        order = sorted_rows(data.users, times)
        tied = _tied(data, order)
        if tied.any():
            _report(data.name, tied_share(data))
            rows = np.sort(order[tied])
            keys = pair_numbers(data.with_rows(rows), self._seed, "split", _TIES)
            # A position of a tied run goes to a row of that run, as both are sorted alike.
            order[tied] = rows[np.lexsort((keys, times[rows], data.users[rows]))]
        positions = np.empty(len(data), dtype=np.int64)
        positions[order] = within_groups(np.bincount(data.users))
        return positions


@functools.lru_cache  # a split and the clients' sequences need the same order
def _report(name: str, share: float) -> None:
    if share < _LEAST_SHARE:
        return
    log.warning(
        "%s: %.1f%% of the rows share their time with a row of another item of their user; the seed"
        " decides the order of these",
        name,
        100 * share,
    )


def tied_share(interactions: Interactions) -> float:
    """Share of the rows, in [0, 1], that have their time in common with a row of their user of
    another item; 0 without rows.

    Raises:
        DataError: the interactions have no times.
    """
    times = times_of(interactions)
    users = interactions.users
    items = interactions.items
    order = np.lexsort((items, times, users))
    rows = np.stack([users, times, items])[:, order]
    repeats = np.concatenate([[False], (rows[:, 1:] == rows[:, :-1]).all(0)])[: len(order)]
    order = order[~repeats]
    return float(_tied(interactions, order).mean()) if len(order) else 0.0


def times_of(interactions: Interactions) -> np.ndarray:
    """`int64 [rows]`: the times of interactions.

    Raises:
        DataError: they have none.
    """
    if interactions.times is None:
        raise no_times(interactions.name, "cannot be split by time")
    return interactions.times


def sorted_rows(users: np.ndarray, key: np.ndarray) -> np.ndarray:
    """`int64 [rows]`: row numbers by user, then by key, then as they are.

    Args:
        users: `int64 [rows]`, each >= 0.
        key: integers `[rows]`.
    """
    least = int(key.min(initial=0))
    span = int(key.max(initial=0)) - least + 1
    most = np.iinfo(np.int64).max
    # whole seconds, as nanoseconds, are counted as seconds
    unit = max(int(np.gcd.reduce(key - least)), 1) if span <= most else 1
    span = (span - 1) // unit + 1
    if int(users.max(initial=0)) + 1 > most // span:
        return np.lexsort((key, users))
    # One sort of one number: rows are mostly grouped by user already, which makes it some twenty
    # times as fast as one by each of the two.
    number = users * span
    if unit > 1:
        key = (key - least) // unit
        least = 0
    number += key
    number -= least
    return np.argsort(number, kind="stable")


def _tied(data: Interactions, order: np.ndarray) -> np.ndarray:
    """`bool [rows]`: which rows, in this order by user and time, have the user and the time of one
    beside them."""
    users = data.users[order]
    times = times_of(data)[order]
    same = (users[1:] == users[:-1]) & (times[1:] == times[:-1])
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] = same
    tied[:-1] |= same
    return tied


# Rows of interactions grouped by user, so that those of some users are found at once.


@dataclass(frozen=True, eq=False)
class UserRows:
    """Rows of some clients, ragged: those of position c are `offsets[c]:offsets[c + 1]`.

    Attributes:
        data: the dataset.
        all_labels: `float32` or `bool [all rows]`, labels of the dataset's rows.
        order: of each user's rows.
        clients: `int64 [clients]`, ids of the clients.
        owner: `int64 [rows]`, ascending: position of each row's client among them.
        rows: `int64 [rows]`, row numbers in the dataset.
    """

    data: Interactions
    all_labels: np.ndarray
    order: TimeOrder
    clients: np.ndarray
    owner: np.ndarray
    rows: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        """`int64 [clients + 1]`: where the rows of each client begin."""
        counts = np.bincount(self.owner, minlength=len(self.clients))
        return np.concatenate([[0], np.cumsum(counts)])

    @property
    def ids(self) -> np.ndarray:
        """`int64 [rows]`: the client of each row."""
        return self.clients[self.owner]

    @property
    def items(self) -> np.ndarray:
        """`int64 [rows]`."""
        return self.data.items[self.rows]

    @property
    def lists(self) -> tuple[np.ndarray, np.ndarray]:
        """`offsets`, `int64 [clients + 1]`, and `items`, `int64 [rows]`."""
        return self.offsets, self.items

    @property
    def pairs(self) -> np.ndarray:
        """`int64 [rows]`: a number of each pair of a client, by its position, and an item."""
        return self.owner * self.data.num_items + self.items

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

    def sequences(self) -> tuple[np.ndarray, np.ndarray]:
        """`offsets`, and the items `int64 [rows]` of each client from the earliest to the latest;
        the seed decides where times are equal.

        Raises:
            DataError: there are no times.
        """
        times = self.times
        if times is None:
            raise no_times(self.data.name, "has no order of items")
        return self.offsets, self.items[np.lexsort((times, self.owner))]

    def mask(self) -> np.ndarray:
        """`bool [clients, items]`: the items of the rows."""
        table = np.zeros((len(self.clients), self.data.num_items), dtype=bool)
        table[self.owner, self.items] = True
        return table

    def where(self, chosen: np.ndarray) -> UserRows:
        """Some of the rows, `bool [rows]`."""
        return replace(self, owner=self.owner[chosen], rows=self.rows[chosen])


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
        users = interactions.users if rows is None else interactions.users[rows]
        if (users[1:] < users[:-1]).any():
            by_user = np.argsort(users, kind="stable")
            rows = by_user if rows is None else rows[by_user]
        self._rows = rows  # None: the rows of the data are grouped already
        counts = np.bincount(users, minlength=interactions.num_users)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])

    def counts(self, users: np.ndarray) -> np.ndarray:
        """`int64 [users]`: number of selected rows of some users."""
        return self._offsets[users + 1] - self._offsets[users]

    def of(self, users: np.ndarray, clients: np.ndarray) -> UserRows:
        """The selected rows of some users `int64 [users]`, whose ids are `clients`."""
        counts = self.counts(users)
        owner = np.repeat(np.arange(len(users)), counts)
        rows = spans(self._offsets[users], counts)
        if self._rows is not None:
            rows = self._rows[rows]
        return UserRows(self._data, self._labels, self._order, clients, owner, rows)
