# SPDX-License-Identifier: Apache-2.0
"""Counts over long rows of scores in compiled code."""

import numpy as np

from fedrec.runtime.compilation import compiled


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
