# SPDX-License-Identifier: Apache-2.0
"""Sums of outer products of sparse vectors in compiled code."""

from fedrec.runtime.compilation import compiled


@compiled
def add_outer_products(total, offsets, rows, values, shares):
    """Add share times the outer product of each vector with itself.

    Args:
        total: `float64 [m, m]`, changed in place.
        offsets: `int64 [C + 1]`: the entries of vector c are those from `offsets[c]` up to
            `offsets[c + 1]`.
        rows: `int64 [n]`, the place of each entry, in `[0, m)`, distinct within a vector.
        values: `float64 [n]`.
        shares: `float64 [C]`.
    """
    for client in range(len(shares)):
        start = offsets[client]
        stop = offsets[client + 1]
        share = shares[client]
        if share == 0.0:
            continue
        for one in range(start, stop):
            row = total[rows[one]]
            value = values[one]
            for other in range(start, stop):
                row[rows[other]] += share * (value * values[other])
