# SPDX-License-Identifier: Apache-2.0
"""The order of each user's rows, which all splits use."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedrec.data.interactions import Interactions, no_times
from fedrec.rng import stream

Order = Literal["random", "temporal"]

# Parts of the "split" stream. Users and rows have separate streams, so that the order of a user's
# rows does not depend on the number of held-out users.
USERS = 0
ROWS = 1
VALIDATION = 2


def sort_key(interactions: Interactions, order: Order, seed: int) -> np.ndarray:
    """`int64 [rows]` by which rows are sorted: their times, or a random permutation.

    Raises:
        DataError: the order is temporal and the interactions have no times.
    """
    if order == "random":
        return stream(seed, "split", ROWS).permutation(len(interactions))
    return times_of(interactions)


def times_of(interactions: Interactions) -> np.ndarray:
    """`int64 [rows]`: the times of interactions.

    Raises:
        DataError: they have none.
    """
    if interactions.times is None:
        raise no_times(interactions.name, "cannot be split by time")
    return interactions.times


def places(users: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Position of each row in its user's sequence.

    Args:
        users: `int64 [rows]`, each >= 0.
        key: `int64 [rows]`; rows with equal keys keep their order.

    Returns:
        `int64 [rows]` twice: the row's position, from 0, and the number of rows of its user.
    """
    order = np.lexsort((key, users))
    counts = np.bincount(users)
    starts = np.cumsum(counts) - counts
    place = np.empty(len(users), dtype=np.int64)
    place[order] = np.arange(len(users)) - np.repeat(starts, counts)
    return place, counts[users]


def users_of(interactions: Interactions, rows: np.ndarray) -> np.ndarray:
    """`int64 [users]`, ascending: the users who have at least one of the `rows` (row numbers, or a
    mask)."""
    return np.flatnonzero(np.bincount(interactions.users[rows], minlength=interactions.num_users))
