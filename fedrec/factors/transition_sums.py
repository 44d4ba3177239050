# SPDX-License-Identifier: Apache-2.0
"""Sums of the transitions of very many sequences (`fedrec.factors.transitions`) in compiled code.

The transitions from an item are summed over all places where it is, in one row of numbers, and what
is not zero is kept. So the memory is that of the sums, and not of the transitions, of which there
are up to a window per place.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from fedrec.data.time_weighting import RecencyConfig
from fedrec.runtime.compilation import compiled


def transition_sums(
    offsets: np.ndarray, items: np.ndarray, num_items: int, recency: RecencyConfig
) -> tuple[sparse.csr_array, np.ndarray, np.ndarray]:
    """T of users' sequences, and its sums.

    Args:
        offsets: `int64 [users + 1]`: user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [n]`, each user's from the earliest to the latest.
        num_items: size of the catalogue.
        recency: window and decay.

    Returns:
        T, `float32 [items, items]`, and the sums of its rows and of its columns, `float64 [items]`.
    """
    starts = np.concatenate([[0], np.cumsum(np.bincount(items, minlength=num_items))])
    places = np.argsort(items, kind="stable")
    left = np.repeat(offsets[1:], np.diff(offsets)) - np.arange(len(items)) - 1
    follow = np.minimum(left, recency.window).astype(np.int32)
    ends = np.zeros(num_items + 1, dtype=np.int64)
    count_followers(ends[1:], starts, places, items, follow, np.full(num_items, -1))
    np.cumsum(ends, out=ends)
    columns = np.empty(ends[-1], dtype=np.int32)
    values = np.empty(ends[-1], dtype=np.float32)
    sums = np.zeros((2, num_items))
    weights = float(recency.decay) ** np.arange(recency.window)
    row = np.zeros(num_items)
    add_followers(columns, values, sums, ends, starts, places, items, follow, weights, row)
    if ends[-1] <= np.iinfo(np.int32).max:  # else SciPy makes 64 bits of all columns
        ends = ends.astype(np.int32)
    total = sparse.csr_array((values, columns, ends), shape=(num_items, num_items))
    return total, sums[0], sums[1]


@compiled
def count_followers(counts, starts, places, items, follow, seen):
    """How many different items follow each item.

    Args:
        counts: `int64 [items]`, zero; becomes the numbers.
        starts: `int64 [items + 1]`: item i is at `places[starts[i]:starts[i + 1]]`.
        places: `int64 [n]`.
        items: `int64 [n]`, all sequences, one after the other.
        follow: `int32 [n]`, how many of the next items count.
        seen: `int64 [items]`, -1; changed.
    """
    for item in range(len(counts)):
        for place in places[starts[item] : starts[item + 1]]:
            for later in items[place + 1 : place + 1 + follow[place]]:
                if later != item and seen[later] != item:
                    seen[later] = item
                    counts[item] += 1


@compiled
def add_followers(columns, values, sums, ends, starts, places, items, follow, weights, row):
    """The sums of the transitions from each item.

    Args:
        columns: `int32 [sums]`; becomes the items that follow, of each item those from `ends[i]`.
        values: `float32 [sums]`; becomes the sums of their weights.
        sums: `float64 [2, items]`, zero; becomes the sums of rows and columns.
        ends: `int64 [items + 1]`, from `count_followers`.
        starts: see there.
        places: likewise.
        items: likewise.
        follow: likewise.
        weights: `float64 [window]`, of each distance.
        row: `float64 [items]`, zero; is so again afterwards.
    """
    for item in range(len(ends) - 1):
        end = ends[item]
        for place in places[starts[item] : starts[item + 1]]:
            for distance in range(follow[place]):
                later = items[place + 1 + distance]
                if later != item:
                    if row[later] == 0.0:
                        columns[end] = later
                        end += 1
                    row[later] += weights[distance]
        for at in range(ends[item], end):
            later = columns[at]
            values[at] = row[later]
            sums[0, item] += row[later]
            sums[1, later] += row[later]
            row[later] = 0.0


@compiled
def scale(values, columns, ends, left, right):
    """Multiply rows by `left` and columns by `right`, `float64 [items]` each, in place; the other
    arguments as of `add_followers`."""
    for item in range(len(left)):
        for at in range(ends[item], ends[item + 1]):
            values[at] *= left[item] * right[columns[at]]
