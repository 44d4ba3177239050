# SPDX-License-Identifier: Apache-2.0
"""Integers in groups: the distinct ones of an array, and the members of groups that lie one after
the other."""

from __future__ import annotations

import numpy as np


def distinct(numbers: np.ndarray) -> np.ndarray:
    """The same as `np.unique`, ascending, `[n]` -> `[m]`, but much faster for a few thousand
    numbers."""
    ordered = np.sort(numbers)
    first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def within_groups(counts: np.ndarray) -> np.ndarray:
    """`int64 [sum of counts]`: from 0 on within each group, of the sizes `int64 [groups]`."""
    found = np.arange(int(counts.sum()))
    found -= np.repeat(np.cumsum(counts) - counts, counts)
    return found


def spans(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`int64 [sum of counts]`: from the start of each group on, `int64 [groups]` each."""
    found = within_groups(counts)
    found += np.repeat(starts, counts)
    return found
