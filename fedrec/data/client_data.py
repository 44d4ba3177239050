# SPDX-License-Identifier: Apache-2.0
"""Rows of users and data of clients: order by time, grouping, random numbers independent of other
users' data, and sampling of negative items."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from fedrec.data.interactions import Interactions, no_times, time_weighted
from fedrec.errors import DataError
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
    least = key.min(initial=0)
    span = int(key.max(initial=0)) - int(least) + 1
    if span * (int(users.max(initial=0)) + 1) > np.iinfo(np.int64).max:
        return np.lexsort((key, users))
    # one number is faster to sort by than two, as rows are mostly grouped by user already
    return np.argsort(users * span + (key - least).astype(np.int64), kind="stable")


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


# Training and held-out data of clients.


@dataclass(frozen=True, eq=False)
class ClientData:
    """Training data of one client.

    Attributes:
        client: the client's id (its user index).
        features: per user feature the client's category codes, `int64 [codes]`.
        items: `int64 [n]`, the items of its training rows.
        labels: `float32 [n]`; ranking: 1 positive, 0 not; rating: the rating.
        positives: `int64 [items]`, ascending, distinct: the positive items among them. Negatives
            are drawn outside these only: an item held out for testing must be as likely to be a
            negative as one never seen.
        times: `int64 [n]`, distinct: the position of each training row in the client's sequence
            (`fedrec.data.client_data`); None if the dataset has no times.
        ratings: `float32 [n]`, rating of each training row; None if the dataset has none.
        avoided: `int64 [items]`, ascending, distinct: items excluded from negatives, if more than
            the positives (`Partition.leaky_negatives`); None: only the positives are excluded.
    """

    client: int
    features: tuple[np.ndarray, ...]
    items: np.ndarray
    labels: np.ndarray
    positives: np.ndarray
    times: np.ndarray | None = None
    ratings: np.ndarray | None = None
    avoided: np.ndarray | None = None

    @property
    def never_negative(self) -> np.ndarray:
        """Items that are never drawn as negatives, `int64 [items]`, ascending, distinct."""
        return self.positives if self.avoided is None else self.avoided

    def weighted_items(self, low_rated: float) -> tuple[np.ndarray, np.ndarray]:
        """Distinct items, `int64 [n]`, ascending, and their weights, `float32 [n]`: 1 for positive
        items and `low_rated`, in [0, 1], for others; 0 leaves these out."""
        items = np.union1d(self.items, self.positives) if low_rated else self.positives
        weights = np.where(np.isin(items, self.positives), 1, low_rated).astype(np.float32)
        return items, weights

    def without_rows(self) -> ClientData:
        """Copy of the client without rows."""
        names = ("items", "labels", "positives", "times", "ratings", "avoided")
        columns = {name: getattr(self, name) for name in names}
        return replace(self, **{n: None if v is None else v[:0] for n, v in columns.items()})

    def order(self) -> np.ndarray:
        """Row numbers from the earliest to the latest, `int64 [n]`; in the source's order without
        times."""
        if self.times is None:
            return np.arange(len(self.items))
        return np.argsort(self.times, kind="stable")

    def sequence(self) -> np.ndarray:
        """Items of positive rows from the earliest to the latest, `int64 [n]`.

        Raises:
            DataError: there are no times.
        """
        if self.times is None:
            raise no_times(f"the data of client {self.client}", "have no order")
        order = self.order()
        return self.items[order[self.labels[order] > 0]]

    def amounts(self, rated: bool) -> np.ndarray:
        """Preference for each positive item, `float32 [items]`: 1, or if `rated` the time-weighted
        rating."""
        if not rated:
            return np.ones(len(self.positives), dtype=np.float32)
        liked = self.labels > 0
        # labels that are ratings may be 0 or less for positive items
        others = np.setdiff1d(self.positives, self.items[liked])
        rows = np.flatnonzero(liked | np.isin(self.items, others))
        ratings, times = (
            None if column is None else column[rows] for column in (self.ratings, self.times)
        )
        return time_weighted(np.zeros_like(rows), self.items[rows], ratings, times)[2]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Test data of a block of users, as masks and weights over the catalogue.

    Attributes:
        seen: `bool [users, items]`, items the user interacted with in any part.
        known: `bool [users, items]`, items of the training part.
        learned: `bool [users, items]`, items of the rows that are trained on; equal to `known`
            without a perturbation.
        relevant: `bool [users, items]`, held-out positives.
        weight: `int64 [users, items]`, how many held-out positive rows each has, or None when none
            repeats.
    """

    seen: np.ndarray
    known: np.ndarray
    learned: np.ndarray
    relevant: np.ndarray
    weight: np.ndarray | None

    def masked(self, how: Literal["real", "learned", "both"]) -> np.ndarray:
        """Items excluded from whole lists, `bool [users, items]` (`evaluation.masked`)."""
        if how == "both":
            return self.known | self.learned
        return self.known if how == "real" else self.learned


# Negative items for training, drawn outside a client's training positives only.
#
# Widely used federated code draws them outside the training *and held-out* positives. Then a
# held-out item is the one item that never becomes a negative, and a score that merely counts how
# often an item was drawn finds it: a leak that reaches Hits@10 = 1 without any learning. So
# held-out items must remain possible negatives, and must not be passed to this function.

_TABLE = 16  # list all negatives if the catalogue has at most this many items per draw


def draw_negatives(
    positives: np.ndarray, num_items: int, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Draw items uniformly, with replacement, from those outside `positives`.

    Exact and without rejection: a rank among the non-positives is drawn, and shifted past the
    positives that precede it, or looked up in a list of them if it is short for what is drawn. Time
    and memory depend on `count` and on the number of positives, not on the catalogue.

    Args:
        positives: `int64 [p]`, ascending and distinct, each in `[0, num_items)`: the client's
            *training* positives.
        num_items: size of the catalogue.
        count: number of items to draw, >= 0.
        generator: source of randomness.

    Returns:
        `int64 [count]`, each in `[0, num_items)` and not in `positives`.

    Raises:
        DataError: every item is positive.
    """
    free = num_items - len(positives)
    if free <= 0:
        raise DataError(
            f"a client has no negative items: all {num_items:,} items are positive",
            fix="leave this client out, or enlarge the catalogue",
        )
    ranks = generator.integers(0, free, size=count)
    if num_items > _TABLE * count:
        return nth_outside(positives, ranks)
    outside = np.ones(num_items, dtype=bool)
    outside[positives] = False
    return np.flatnonzero(outside)[ranks]


def nth_outside(positives: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Items `int64 [items]` at the given ranks (from 0) among those outside `positives`
    (ascending, distinct)."""
    # positives[i] - i non-positives lie before the i-th positive.
    free_before = positives - np.arange(len(positives))
    return rank + np.searchsorted(free_before, rank, side="right")
