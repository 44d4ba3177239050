# SPDX-License-Identifier: Apache-2.0
"""Products of, and sums over, rows of users' embeddings in compiled code. The rows are ordered by
item; those of one item stay in cache while they are used."""

import numpy as np
from numba import njit

from fedrec.nn.native.memory import matrix
from fedrec.nn.native.products import add_outputs, input_gradients, whole
from fedrec.nn.native.rows import copy_row
from fedrec.runtime.compilation import FAST, compiled


@compiled
def add_products(starts, users, values, place, shared, found):
    """Add the inner products of some users' rows, and of a shared table's, with everybody's.

    Args:
        starts: `int64 [items + 1]`; an item's rows are those from `starts[i]` up to
            `starts[i + 1]`.
        users: `int64 [n]`, the user of each row, distinct within an item.
        values: `float32 [n, d]`.
        place: `int64 [users]`, the column of `found` of each user; -1: none.
        shared: `float32 [items, d]`.
        found: `float64 [users, places + 1]`, added to; the last column is that of the shared table.
    """
    most = _most(starts[:-1], starts[1:])
    width = values.shape[1]
    room = np.empty(whole(most + 1) * width, np.float32)
    some = np.empty(whole(most + 1) * width, np.float32)
    lines = np.empty(whole(most + 1) * most, np.float32)
    targets = np.empty(most + 1, np.int64)
    for item in range(len(starts) - 1):
        own = values[starts[item] : starts[item + 1]]
        theirs = users[starts[item] : starts[item + 1]]
        if len(own) == 0:
            continue
        asked = 0
        chosen = matrix(some, 0, whole(len(own) + 1), width)
        for other in range(len(own)):
            column = place[theirs[other]]
            if column >= 0:
                targets[asked] = column
                copy_row(own[other], chosen[asked])
                asked += 1
        targets[asked] = found.shape[1] - 1
        copy_row(shared[item], chosen[asked])
        asked += 1
        columns = whole(asked)  # as single columns take as long as a block of them
        chosen[asked:columns] = 0
        products = matrix(lines, 0, len(own), columns)
        input_gradients(own, chosen[:columns], products, room)
        for other in range(len(own)):
            into = found[theirs[other]]
            line = products[other]
            for one in range(asked):
                into[targets[one]] += line[one]


@compiled
def weighted_sums(begins, ends, users, values, asked, asking, weights, found):
    """Add sums of an item's rows by the weights of their users.

    Args:
        begins, ends: `int64 [items]`; an item's rows are those from `begins[i]` up to `ends[i]`.
        users: `int64 [rows]`, the user of each row.
        values: `float32 [rows, d]`.
        asked: `int64 [items + 1]`; an item's sums are those from `asked[i]` up to `asked[i + 1]`.
        asking: `int64 [n]`, whose weights a sum takes.
        weights: `float32 [askers, users]`.
        found: `float32 [n, d]`, added to.
    """
    shares = np.empty(_most(begins, ends) * _most(asked[:-1], asked[1:]), np.float32)
    room = np.empty(0, np.float32)  # no factor is transposed
    for item in range(len(begins)):
        own = values[begins[item] : ends[item]]
        theirs = users[begins[item] : ends[item]]
        askers = asking[asked[item] : asked[item + 1]]
        if len(own) == 0 or len(askers) == 0:
            continue
        factors = matrix(shares, 0, len(askers), len(own))
        for one in range(len(askers)):
            given = weights[askers[one]]
            for other in range(len(own)):
                factors[one, other] = given[theirs[other]]
        add_outputs(factors, own, found[asked[item] : asked[item + 1]], room)


@compiled
def merge_rows(table, start, held, added, places):
    """Keep some rows of a table, and insert others between them, in the same memory: rows that
    begin it are moved to its end, and others to its beginning.

    Args:
        table: `float32 [capacity, d]`, changed; the capacity is at least that for the rows that it
            has and those that are inserted.
        start: where its rows begin.
        held: how many they are.
        added: `float32 [a, d]`, other memory.
        places: `int64 [n]`, what is where in the end: a row that the table has, from 0 on and in
            ascending order, or `held` and a row of `added`.

    Returns:
        Where the rows begin.
    """
    target = 0 if start else len(table) - len(places)
    for step in range(len(places)):
        n = step if start else len(places) - 1 - step
        place = places[n]
        row = table[start + place] if place < held else added[place - held]
        copy_row(row, table[target + n])
    return target


@njit(**FAST)
def _most(begins, ends):
    """The largest number of rows of one item."""
    most = 0
    for place in range(len(begins)):
        most = max(most, ends[place] - begins[place])
    return most
