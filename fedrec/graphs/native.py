# SPDX-License-Identifier: Apache-2.0
"""Products of, and sums over, rows of users' embeddings in compiled code. The rows are ordered by
item; those of one item stay in cache while they are used."""

import numpy as np

from fedrec.runtime.compilation import compiled


@compiled
def add_products(starts, users, values, place, found):
    """Add the inner products of some users' rows with everybody's.

    Args:
        starts: `int64 [items + 1]`; an item's rows are those from `starts[i]` up to
            `starts[i + 1]`.
        users: `int64 [n]`, the user of each row, distinct within an item.
        values: `float32 [n, d]`.
        place: `int64 [users]`, the row of `found` of each user; -1: none.
        found: `float64 [places, users]`, added to.
    """
    width = values.shape[1]
    most = 0
    for item in range(len(starts) - 1):
        most = max(most, starts[item + 1] - starts[item])
    across = np.empty((width, most), dtype=values.dtype)
    line = np.empty(most, dtype=values.dtype)
    for item in range(len(starts) - 1):
        start = starts[item]
        count = starts[item + 1] - start
        for other in range(count):
            for k in range(width):
                across[k, other] = values[start + other, k]
        for one in range(start, start + count):
            row = place[users[one]]
            if row < 0:
                continue
            line[:count] = 0.0
            for k in range(width):
                factor = values[one, k]
                column = across[k]
                for other in range(count):
                    line[other] += factor * column[other]
            into = found[row]
            for other in range(count):
                into[users[start + other]] += line[other]


@compiled
def weighted_sums(begins, ends, users, values, asking, weights, found):
    """Sums of rows by the weights of their users.

    Args:
        begins, ends: `int64 [n]`: the rows of the n-th sum are those from `begins[n]` up to
            `ends[n]`.
        users: `int64 [rows]`, the user of each row.
        values: `float [rows, d]`.
        asking: `int64 [n]`, whose weights a sum takes.
        weights: `float [askers, users]`.
        found: `float [n, d]`, output.
    """
    width = found.shape[1]
    total = np.empty(width, dtype=found.dtype)
    for n in range(len(begins)):
        own = weights[asking[n]]
        total[:] = 0.0
        for row in range(begins[n], ends[n]):
            weight = own[users[row]]  # no branch on 0, which could not be predicted
            value = values[row]
            for k in range(width):
                total[k] += weight * value[k]
        found[n] = total
