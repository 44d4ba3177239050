# SPDX-License-Identifier: Apache-2.0
"""Integers in groups, and dictionaries in one."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

# Integers in groups: distinct values of an array, their numbers, and members of concatenated
# groups.

_TABLE = 8  # largest size of a lookup table, per given number


def distinct(numbers: np.ndarray) -> np.ndarray:
    """Distinct numbers, ascending, `[n]` -> `[m]`: `np.unique`, but much faster for a few thousand
    numbers, and for non-negative integers not much larger than n."""
    if numbers.dtype.kind in "iu" and numbers.min(initial=0) >= 0:
        most = int(numbers.max(initial=0)) + 1
        if most <= _TABLE * len(numbers):
            present = np.zeros(most, dtype=bool)
            present[numbers] = True
            return np.flatnonzero(present).astype(numbers.dtype, copy=False)
    ordered = np.sort(numbers)
    first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def are_distinct(ids: np.ndarray) -> bool:
    """True if no two ids `[n]`, numbers or texts, are equal."""
    if ids.dtype.kind in "iu":
        ascending = bool((ids[1:] > ids[:-1]).all())  # the usual case, which needs no sorting
        return ascending or len(distinct(ids)) == len(ids)
    return len(set(ids.tolist())) == len(ids)


def within_groups(counts: np.ndarray) -> np.ndarray:
    """Positions within groups of sizes `int64 [groups]`, from 0, `int64 [sum of counts]`."""
    positions = np.arange(int(counts.sum()))
    positions -= np.repeat(np.cumsum(counts) - counts, counts)
    return positions


def spans(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenated ranges `int64 [sum of counts]`, of starts and lengths `int64 [groups]`."""
    numbers = within_groups(counts)
    numbers += np.repeat(starts, counts)
    return numbers


# Several dictionaries in one, distinguished by prefixes of the names.

Value = TypeVar("Value")


def add_prefix(tables: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """Merge several dictionaries, each under its prefix, in order; `strip_prefix` extracts one."""
    return {
        f"{prefix}{name}": value
        for prefix, table in tables.items()
        for name, value in table.items()
    }


def strip_prefix(prefix: str, table: Mapping[str, Value]) -> dict[str, Value]:
    """Select the entries whose names begin with a prefix, and remove it from the names."""
    return {
        name.removeprefix(prefix): value for name, value in table.items() if name.startswith(prefix)
    }


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the values of nested dictionaries by full key, such as `strategy.server-lr`."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
