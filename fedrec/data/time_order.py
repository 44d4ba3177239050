# SPDX-License-Identifier: Apache-2.0
"""Rows of users: order by time, grouping, and random numbers independent of other users' data."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedrec.data.interactions import Interactions, no_times
from fedrec.rng import hashed, mixed, seed_sequence
from fedrec.runtime.ragged import spans, within_groups

# Random numbers of users and of their rows, independent of other users' data.
#
# Numbers drawn for all rows from one stream change for all users if one has a row more or less.
# These are hashes of the seed, the user's name and, for a row, its position among the user's rows.

_SHIFT = np.uint64(32)  # the upper half of a hash is the number


def row_numbers(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    """Random number in [0, 2^32) for each row, `int64 [rows]`.

    Args:
        interactions: the rows.
        seed: of the experiment.
        name: of the stream, see `fedrec.rng.stream`.
        address: of the stream.
    """
    position = np.empty(len(interactions), dtype=np.uint64)
    position[interactions.user_order] = within_groups(np.diff(interactions.user_offsets))
    users = _hashes(interactions.user_ids, seed, name, *address)
    return (mixed(users[interactions.users] + position) >> _SHIFT).astype(np.int64)


def pair_numbers(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    """Random number in [0, 2^32) for each row's user and item, `int64 [rows]`, independent of the
    order of rows; arguments as of `row_numbers`."""
    users = _hashes(interactions.user_ids, seed, name, *address)
    items = hashed(interactions.item_ids.tolist())
    numbers = mixed(users[interactions.users] + items[interactions.items])
    return (numbers >> _SHIFT).astype(np.int64)


def hashed_shares(ids: np.ndarray, seed: int, name: str, *address: int) -> np.ndarray:
    """Random number in [0, 1) for each id of a user or an item, `float64 [n]`; other arguments as
    of `row_numbers`."""
    return (_hashes(ids, seed, name, *address) >> _SHIFT) / 2.0**32


def _hashes(ids: np.ndarray, seed: int, name: str, *address: int) -> np.ndarray:
    salt = seed_sequence(seed, name, *address).generate_state(1, np.uint64)
    return mixed(hashed(ids.tolist()) ^ salt)


# Each user's rows in the order of their times; the seed decides the order of rows of equal times.
#
# Exports list the rows of one day or second by item, or by popularity. If rows of equal times kept
# the order of their file, sequential systems would learn that order, and a split by time would test
# the items that the file lists last. So their order is a hash of the seed, the user's name and the
# item's name, independent of the order of lines and of other users' rows.

log = logging.getLogger("fedrec.data")

_LEAST_SHARE = 0.0005  # smallest share that is reported, a tenth of a percent when rounded
_TIES = 4  # part of the stream "split", after those of fedrec.data.splits


def time_positions(interactions: Interactions, seed: int) -> np.ndarray:
    """Position of each row in its user's sequence, from 0, `int64 [rows]`; `seed` is that of the
    split.

    Raises:
        DataError: the interactions have no times.
    """
    times = times_of(interactions)
    order = sorted_rows(interactions.users, times)
    tied = _tied(interactions, order)
    if tied.any():
        _report(interactions.name, tied_share(interactions))
        rows = np.sort(order[tied])
        keys = pair_numbers(interactions.with_rows(rows), seed, "split", _TIES)
        # A position of a tied run goes to a row of that run, as both are sorted alike.
        order[tied] = rows[np.lexsort((keys, times[rows], interactions.users[rows]))]
    positions = np.empty(len(interactions), dtype=np.int64)
    positions[order] = within_groups(np.bincount(interactions.users))
    return positions


@functools.lru_cache  # a split and the clients' sequences need the same order
def _report(name: str, share: float) -> None:
    if share < _LEAST_SHARE:
        return
    log.warning(
        "%s: %.1f%% of the rows have the same time as another item of their user; the seed decides"
        " their order",
        name,
        100 * share,
    )


def tied_share(interactions: Interactions) -> float:
    """Share of the rows, in [0, 1], with the same time as another item of their user; 0 without
    rows.

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
    """Times of interactions, `int64 [rows]`.

    Raises:
        DataError: the interactions have no times.
    """
    if interactions.times is None:
        raise no_times(interactions.name, "cannot be split by time")
    return interactions.times


def sorted_rows(users: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Row numbers sorted by user, then by key, then in their order, `int64 [rows]`.

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
    # One sort by one number: rows are mostly grouped by user already, which makes it about twenty
    # times as fast as two sorts.
    number = users * span
    if unit > 1:
        key = (key - least) // unit
        least = 0
    number += key
    number -= least
    return np.argsort(number, kind="stable")


def _tied(data: Interactions, order: np.ndarray) -> np.ndarray:
    """Mask `bool [rows]` of rows, in this order by user and time, with the same user and time as a
    neighbouring row."""
    users = data.users[order]
    times = times_of(data)[order]
    same = (users[1:] == users[:-1]) & (times[1:] == times[:-1])
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] = same
    tied[:-1] |= same
    return tied


# Rows of interactions grouped by user, for fast selection of users.


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Interactions with labels, in each user's order of time.

    Attributes:
        data: the dataset.
        labels: `float32` or `bool [rows]`.
        seed: of the split.
    """

    data: Interactions
    labels: np.ndarray
    seed: int

    @cached_property
    def positions(self) -> np.ndarray | None:
        """Position of each row in its user's sequence, `int64 [rows]`; None without times."""
        return None if self.data.times is None else time_positions(self.data, self.seed)


@dataclass(frozen=True, eq=False)
class UserRows:
    """Ragged rows of some clients; the rows of client c are `offsets[c]:offsets[c + 1]`.

    Attributes:
        source: all rows of the dataset.
        clients: `int64 [clients]`, ids of the clients.
        owner: `int64 [rows]`, ascending: position of each row's client in `clients`.
        rows: `int64 [rows]`, row numbers in the dataset.
    """

    source: LabelledRows
    clients: np.ndarray
    owner: np.ndarray
    rows: np.ndarray

    @property
    def data(self) -> Interactions:
        """The dataset."""
        return self.source.data

    @property
    def offsets(self) -> np.ndarray:
        """Start of the rows of each client, `int64 [clients + 1]`."""
        counts = np.bincount(self.owner, minlength=len(self.clients))
        return np.concatenate([[0], np.cumsum(counts)])

    @property
    def ids(self) -> np.ndarray:
        """Client of each row, `int64 [rows]`."""
        return self.clients[self.owner]

    @property
    def items(self) -> np.ndarray:
        """Item of each row, `int64 [rows]`."""
        return self.data.items[self.rows]

    @property
    def lists(self) -> tuple[np.ndarray, np.ndarray]:
        """Pair of `offsets`, `int64 [clients + 1]`, and `items`, `int64 [rows]`."""
        return self.offsets, self.items

    @property
    def pairs(self) -> np.ndarray:
        """Number of each row's pair of client position and item, `int64 [rows]`."""
        return self.owner * self.data.num_items + self.items

    @property
    def labels(self) -> np.ndarray:
        """Label of each row, `float32 [rows]`."""
        return self.source.labels[self.rows].astype(np.float32, copy=False)

    @property
    def ratings(self) -> np.ndarray | None:
        """Rating of each row, `float32 [rows]`; None without ratings."""
        return None if self.data.ratings is None else self.data.ratings[self.rows]

    @property
    def times(self) -> np.ndarray | None:
        """Position of each row in its user's sequence, `int64 [rows]`; None without times."""
        positions = self.source.positions
        return None if positions is None else positions[self.rows]

    def sequences(self) -> tuple[np.ndarray, np.ndarray]:
        """Pair of `offsets` and the items `int64 [rows]` of each client from the earliest to the
        latest; the seed decides the order of equal times.

        Raises:
            DataError: there are no times.
        """
        times = self.times
        if times is None:
            raise no_times(self.data.name, "has no order of items")
        return self.offsets, self.items[np.lexsort((times, self.owner))]

    def mask(self) -> np.ndarray:
        """Mask `bool [clients, items]` of the items of the rows."""
        table = np.zeros((len(self.clients), self.data.num_items), dtype=bool)
        table[self.owner, self.items] = True
        return table

    def where(self, chosen: np.ndarray) -> UserRows:
        """Select rows by a mask `bool [rows]`."""
        return replace(self, owner=self.owner[chosen], rows=self.rows[chosen])


class GroupedRows:
    """Selection of the rows of a dataset, grouped by user.

    Args:
        source: all rows.
        rows: `int64 [n]`, row numbers; None: all rows.
    """

    def __init__(self, source: LabelledRows, rows: np.ndarray | None = None) -> None:
        self.source = source
        users = source.data.users if rows is None else source.data.users[rows]
        if (users[1:] < users[:-1]).any():
            by_user = np.argsort(users, kind="stable")
            rows = by_user if rows is None else rows[by_user]
        self._rows = rows  # None: the rows of the data are grouped already
        counts = np.bincount(users, minlength=source.data.num_users)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])

    def counts(self, users: np.ndarray) -> np.ndarray:
        """Number of selected rows of some users, `int64 [users]`."""
        return self._offsets[users + 1] - self._offsets[users]

    def of(self, users: np.ndarray, clients: np.ndarray) -> UserRows:
        """Return the selected rows of some users `int64 [users]` with the ids `clients`."""
        counts = self.counts(users)
        owner = np.repeat(np.arange(len(users)), counts)
        rows = spans(self._offsets[users], counts)
        if self._rows is not None:
            rows = self._rows[rows]
        return UserRows(self.source, clients, owner, rows)
