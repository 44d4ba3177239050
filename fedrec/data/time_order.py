# SPDX-License-Identifier: Apache-2.0
"""Each user's rows in the order of their times; the seed decides the order of rows of one time.

Exports list the rows of one day or second by item, or by popularity. If rows of equal times kept
the order of their file, then systems that know what came last would learn that order, and a split
by time would test the items that the file lists last. So such rows have an order that follows from
a hash of the seed, the user's name and the item's name: it is the same for any order of the lines,
and no other user's rows change it.
"""

from __future__ import annotations

import functools
import logging
from functools import cached_property

import numpy as np

from fedrec.data.interactions import Interactions, no_times
from fedrec.data.own_numbers import pair_numbers
from fedrec.runtime.grouping import within_groups

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
            # A place of a tied run goes to a row of that run, as both are sorted alike.
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
