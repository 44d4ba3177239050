# SPDX-License-Identifier: Apache-2.0
"""What the items of a user count by their times.

An item that a user rated several times has one number (Fang et al. 2022, section 3.2):

    R_ki = sum over t = 1..m of r_ki^t * 2 t / (m (m + 1))

with the ratings in the order of their times, so that later ones count more; the weights add up to
1. Without ratings every r is 1, and so is R.

For what comes next, the last items of a user's sequence count, the later ones more.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config


class RecencyConfig(Config):
    """Settings of how much the items of a sequence count by their distance."""

    window: int = Field(default=10, ge=1)
    """Largest distance, in places, of two items of a transition, and number of last items that a
    score comes from."""
    decay: float = Field(default=0.8, gt=0, le=1)
    """What a distance counts less than the one before, in (0, 1]."""


def time_weighted(
    users: np.ndarray, items: np.ndarray, ratings: np.ndarray | None, times: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """R of every pair of user and item.

    Args:
        users: `int64 [rows]`.
        items: `int64 [rows]`.
        ratings: `float [rows]`; None: 1 each.
        times: `int64 [rows]`; None: the rows are in order. Rows of equal times keep their order.

    Returns:
        Users and items of the pairs, `int64 [pairs]`, ascending, and R, `float32 [pairs]`.
    """
    if not len(users):
        return users, items, np.zeros(0, dtype=np.float32)
    order = np.lexsort((np.arange(len(users)) if times is None else times, items, users))
    pairs = np.stack([users[order], items[order]])
    first = np.concatenate([[True], (pairs[:, 1:] != pairs[:, :-1]).any(0)])
    pair = np.cumsum(first) - 1
    counts = np.bincount(pair)
    place = np.arange(len(pair)) - np.flatnonzero(first)[pair] + 1
    weights = 2 * place / (counts * (counts + 1))[pair]
    values = np.ones(len(pair)) if ratings is None else ratings[order].astype(np.float64)
    return pairs[0, first], pairs[1, first], np.bincount(pair, weights * values).astype(np.float32)


def recent_weights(
    offsets: np.ndarray, items: np.ndarray, num_items: int, recency: RecencyConfig
) -> np.ndarray:
    """What each item counts for the next one: `float32 [users, items]`, decay^(d - 1) for the d-th
    from the end of a user's sequence, d up to the window; of an item that is there twice, the later
    one; 0 for all others.

    Args:
        offsets: `int64 [users + 1]`: user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [n]`, each user's from the earliest to the latest.
        num_items: size of the catalogue.
        recency: window and decay.
    """
    table = np.zeros((len(offsets) - 1, num_items), dtype=np.float32)
    ends = offsets[1:]
    for distance in range(recency.window, 0, -1):
        place = ends - distance
        users = np.flatnonzero(place >= offsets[:-1])
        table[users, items[place[users]]] = recency.decay ** (distance - 1)
    return table


def last_items(offsets: np.ndarray, items: np.ndarray, length: int) -> np.ndarray:
    """`int64 [users, length]`: each user's last items, from the earliest to the latest, and
    -1 after them.

    Args:
        offsets: `int64 [users + 1]`: user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [n]`, each user's from the earliest to the latest.
        length: number of items of a user at most.
    """
    table = np.full((len(offsets) - 1, length), -1, dtype=np.int64)
    counts = np.minimum(np.diff(offsets), length)
    real = np.arange(length) < counts[:, None]
    first = offsets[1:] - counts
    table[real] = items[(first[:, None] + np.arange(length))[real]]
    return table
