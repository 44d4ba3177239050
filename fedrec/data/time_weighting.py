# SPDX-License-Identifier: Apache-2.0
"""One number for a user and an item that it rated several times (Fang et al. 2022, section 3.2).

    R_ki = sum over t = 1..m of r_ki^t * 2 t / (m (m + 1))

with the ratings in the order of their times, so that later ones count more; the weights add up to
1. Without ratings every r is 1, and so is R.
"""

from __future__ import annotations

import numpy as np


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
