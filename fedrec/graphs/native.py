# SPDX-License-Identifier: Apache-2.0
"""Products of, and sums over, rows of users' embeddings in compiled code. The rows are ordered by
item; those of one item are copied side by side and stay in cache while they are used."""

import numpy as np
from numba import njit

from fedrec.nn.native.memory import matrix
from fedrec.nn.native.products import add_outputs, input_gradients
from fedrec.runtime.compilation import FAST, compiled


@compiled
def add_products(starts, users, rows, values, place, shared, found):
    """Add the inner products of some users' rows, and of a shared table's, with everybody's.

    Args:
        starts: `int64 [items + 1]`; an item's rows are those from `starts[i]` up to
            `starts[i + 1]`.
        users: `int64 [n]`, the user of each row, distinct within an item.
        rows: `int64 [n]`, where each is in `values`.
        values: `float32 [rows, d]`.
        place: `int64 [users]`, the row of `found` of each user; -1: none.
        shared: `float32 [items, d]`, rows of a table for each item.
        found: `float64 [places + 2, users]`, added to; in the last but one row the products with
            the shared table, in the last one those of each user with itself.
    """
    width = values.shape[1]
    most = _most(starts[:-1], starts[1:])
    near = np.empty(most * width, np.float32)
    some = np.empty((most + 1) * width, np.float32)
    lines = np.empty((most + 1) * most, np.float32)
    room = np.empty(most * width, np.float32)
    targets = np.empty(most + 1, np.int64)
    for item in range(len(starts) - 1):
        start = starts[item]
        count = starts[item + 1] - start
        own = matrix(near, 0, count, width)
        _gather(rows, values, start, own)
        chosen = matrix(some, 0, count + 1, width)
        asked = 0
        for other in range(count):
            row = place[users[start + other]]
            if row >= 0:
                targets[asked] = row
                chosen[asked] = own[other]
                asked += 1
            total = np.float32(0)
            for k in range(width):
                total += own[other, k] * own[other, k]
            found[-1, users[start + other]] += total
        targets[asked] = len(found) - 2
        chosen[asked] = shared[item]
        asked += 1
        products = matrix(lines, 0, asked, count)
        input_gradients(chosen[:asked], own, products, room)
        for one in range(asked):
            into = found[targets[one]]
            line = products[one]
            for other in range(count):
                into[users[start + other]] += line[other]


@compiled
def weighted_sums(begins, ends, users, rows, values, asking, weights, found):
    """Sums of rows by the weights of their users.

    Args:
        begins, ends: `int64 [n]`, ascending: the rows of the n-th sum are those from `begins[n]` up
            to `ends[n]`.
        users: `int64 [m]`, the user of each row.
        rows: `int64 [m]`, where each is in `values`.
        values: `float32 [rows, d]`.
        asking: `int64 [n]`, whose weights a sum takes.
        weights: `float32 [askers, users]`.
        found: `float32 [n, d]`, zeros, added to.
    """
    width = found.shape[1]
    most = _most(begins, ends)
    near = np.empty(most * width, np.float32)
    shares = np.empty(len(weights) * most, np.float32)
    room = np.empty(1, np.float32)
    first = 0
    while first < len(begins):
        start = begins[first]
        count = ends[first] - start
        last = first + 1
        while last < len(begins) and begins[last] == start and last - first < len(weights):
            last += 1
        if count:
            own = matrix(near, 0, count, width)
            _gather(rows, values, start, own)
            theirs = matrix(shares, 0, last - first, count)
            for asker in range(last - first):
                given = weights[asking[first + asker]]
                for other in range(count):
                    theirs[asker, other] = given[users[start + other]]
            add_outputs(theirs, own, found[first:last], room)
        first = last


@njit(**FAST)
def _most(begins, ends):
    """The largest number of rows of one item."""
    most = 0
    for place in range(len(begins)):
        most = max(most, ends[place] - begins[place])
    return most


@njit(**FAST)
def _gather(rows, values, start, found):
    """Copy rows side by side."""
    for place in range(len(found)):
        value = values[rows[start + place]]
        target = found[place]
        for k in range(target.size):
            target[k] = value[k]
