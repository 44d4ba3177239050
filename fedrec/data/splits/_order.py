# SPDX-License-Identifier: Apache-2.0
"""The order of each user's rows, which all splits use."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedrec.data.interactions import Interactions
from fedrec.data.own_numbers import row_numbers
from fedrec.data.time_order import TimeOrder, sorted_rows
from fedrec.rng import stream
from fedrec.runtime.grouping import within_groups

Order = Literal["random", "temporal"]
Stream = Literal["client", "dataset"]

# Parts of the "split" stream. Users and rows have separate streams, so that the order of a user's
# rows does not depend on the number of held-out users.
USERS = 0
ROWS = 1
VALIDATION = 2
BOUND = 3


def sort_key(
    interactions: Interactions, order: Order, seed: int, source: Stream = "client"
) -> np.ndarray:
    """Integers `[rows]` that order each user's rows: positions in time, or random numbers.

    Args:
        interactions: the rows.
        order: by time, or random.
        seed: of the experiment.
        source: of a random order: each client's own numbers (`row_numbers`), or one shuffle of all
            rows, which changes for everybody when one client has a row more or less.

    Raises:
        DataError: the order is temporal and the interactions have no times.
    """
    if order == "temporal":
        return TimeOrder(interactions, seed).positions
    if source == "client":
        return row_numbers(interactions, seed, "split", ROWS)
    key = np.arange(len(interactions), dtype=np.int32 if len(interactions) < 2**31 else np.int64)
    stream(seed, "split", ROWS).shuffle(key)
    return key


def places(users: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Position of each row in its user's sequence.

    Args:
        users: `int64 [rows]`, each >= 0.
        key: integers `[rows]`; rows with equal keys keep their order.

    Returns:
        `int64 [rows]` twice: the row's position, from 0, and the number of rows of its user.
    """
    counts = np.bincount(users)
    return _place(users, key, counts), counts[users]


def users_of(interactions: Interactions, rows: np.ndarray | None = None) -> np.ndarray:
    """`int64 [users]`, ascending: the users who have at least one of the `rows` (row numbers, or a
    mask; None: all)."""
    present = np.zeros(interactions.num_users, dtype=bool)
    present[interactions.users if rows is None else interactions.users[rows]] = True
    return np.flatnonzero(present)


def _place(users: np.ndarray, key: np.ndarray, counts: np.ndarray) -> np.ndarray:
    place = np.empty(len(users), dtype=np.int64)
    place[sorted_rows(users, key)] = within_groups(counts)
    return place
