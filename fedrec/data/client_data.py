# SPDX-License-Identifier: Apache-2.0
"""Training data of one client, and sampling of its negative items."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedrec.data.interactions import no_times, time_weighted
from fedrec.errors import DataError


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
            (`fedrec.data.time_order`); None if the dataset has no times.
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
