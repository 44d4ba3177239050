# SPDX-License-Identifier: Apache-2.0
"""Memory, rows, counts and numbers of items in compiled code."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedrec.kernel.compiled import FAST, compiled

# Working memory of compiled code.

LINE = 16
"""Numbers in a cache line. Rounding of products depends on the alignment of their matrices, so all
are aligned to cache lines."""


@njit(**FAST)
def matrix(vector, place, rows, columns):
    """A part of a vector as `[rows, columns]`, in the same memory."""
    return vector[place : place + rows * columns].reshape(rows, columns)


@njit(**FAST)
def whole_lines(count):
    """The smallest multiple of a cache line that holds the given number of elements."""
    return -(-count // LINE) * LINE


@njit(**FAST)
def aligned(rows, columns):
    """Memory for `float32 [rows, columns]`, aligned to a cache line."""
    room = np.empty(rows * columns + LINE, np.float32)
    start = (-room.ctypes.data // 4) % LINE
    return room[start : start + rows * columns].reshape(rows, columns)


# Copies and sums of rows of numbers in compiled code.


@njit(**FAST)
def copy_row(row, target):
    """Copy a row; if it is short, an assignment takes several times as long."""
    for k in range(target.size):
        target[k] = row[k]


@njit(**FAST)
def repeat_row(row, targets):
    """Copy a row into each of several, `float32 [n, d]`."""
    for n in range(len(targets)):
        copy_row(row, targets[n])


@njit(**FAST)
def add_row(row, total):
    """Add a row to another."""
    for k in range(total.size):
        total[k] += row[k]


@njit(**FAST)
def add_rows(rows, total):
    """Add rows `float32 [n, d]` to one."""
    for n in range(len(rows)):
        add_row(rows[n], total)


# Numbers for the distinct items of many clients, in compiled code.

_PART = 64  # items that are looked at together: most parts of a large catalogue have none


@compiled
def number_items(references, real, ends, distinct, counts, numbers):
    """Number the distinct items that each of C clients refers to, in ascending order.

    Args:
        references: `int64 [N]`, items >= 0, one client after the other.
        real: `bool [N]`, which of them count.
        ends: `int64 [C]`, where the references of each client end.
        distinct: `int64 [N]`, written: the items of each client, one client after the other.
        counts: `int64 [C]`, written: how many each client has.
        numbers: `int64 [N]`, written: the place of each reference among the client's items; stays
            as it is where `real` is false.
    """
    size = 1
    for n in range(len(references)):
        if real[n]:
            size = max(size, references[n] + 1)
    found = np.zeros(-(-size // _PART) * _PART, np.bool_)
    parts = np.zeros(len(found) // _PART, np.bool_)
    places = np.empty(size, np.int64)
    used = 0
    start = 0
    for client in range(len(ends)):
        for n in range(start, ends[client]):
            if real[n]:
                found[references[n]] = True
                parts[references[n] // _PART] = True
        first = used
        for part in range(len(parts)):
            if not parts[part]:
                continue
            parts[part] = False
            for item in range(part * _PART, (part + 1) * _PART):
                if found[item]:
                    found[item] = False
                    distinct[used] = item
                    places[item] = used - first
                    used += 1
        counts[client] = used - first
        for n in range(start, ends[client]):
            if real[n]:
                numbers[n] = places[references[n]]
        start = ends[client]


# Counts over long rows of scores in compiled code.


@compiled
def add_levels(scores, largest, chunk, values, above, level):
    """Count the scores above each row's value and level with it.

    Args:
        scores: `float [users, items]`.
        largest: `float [users, chunks]`, the largest score of each whole chunk; no row of a chunk
            below the value is read.
        chunk: items in a chunk.
        values: `float [users]`.
        above, level: `int64 [users]`, added to.
    """
    users, items = scores.shape
    chunks = largest.shape[1]
    for user in range(users):
        row = scores[user]
        value = values[user]
        higher = 0
        equal = 0
        for one in range(chunks + 1):
            if one < chunks and largest[user, one] < value:
                continue
            # A part of the row has no negative places to look at, and counts are as wide as scores:
            # so a vector of scores is counted at once, in a fifth of the time.
            part = row[one * chunk : items if one == chunks else (one + 1) * chunk]
            over = np.int32(0)
            same = np.int32(0)
            for place in range(part.size):
                over += np.int32(part[place] > value)
                same += np.int32(part[place] == value)
            higher += over
            equal += same
        above[user] += higher
        level[user] += equal


@compiled
def first_level(row, hidden, value, found):
    """Find the first places of a row with a value.

    Args:
        row: `float [items]`.
        hidden: `bool [items]`, places that do not count; empty: none.
        value: the value, which the row has often enough.
        found: `int64 [number]`, output.
    """
    number = 0
    for place in range(len(row)):
        if number == len(found):
            break
        if row[place] == value and not (len(hidden) and hidden[place]):
            found[number] = place
            number += 1
