# SPDX-License-Identifier: Apache-2.0
"""Sparse updates of tables with one row per item: sums that contain only the changed rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from fedrec.runtime.grouping import distinct
from fedrec.runtime.shared_memory import SharedArray

_PIECE = 2**14  # numbers
_RESERVED = 2**27  # numbers of a table that may be reserved at once


@dataclass(frozen=True, eq=False)
class SparseUpdate:
    """A change of a table `[items, d]`: `drift` times the table, and `values` added to some of its
    rows.

    Attributes:
        shape: shape of the table.
        rows: `int64 [R]`, ascending, distinct.
        values: `[R, d]`.
        drift: weight decay scales every row, named or not, by a factor; this is the sum of those
            factors minus one.
    """

    shape: tuple[int, ...]
    rows: np.ndarray
    values: np.ndarray
    drift: float = 0.0

    def dense(self, table: np.ndarray) -> np.ndarray:
        """The change as a whole table, `float64 [items, d]`; `table` is what it applies to."""
        whole = self.drift * table.astype(np.float64) if self.drift else np.zeros(self.shape)
        whole[self.rows] += self.values
        return whole

    def apply(self, table: np.ndarray, rate: float) -> np.ndarray:
        """Add `rate` times the change to a table `[items, d]`, in place; returns the table."""
        rows = np.asarray(table)[self.rows]
        factor = 1 + rate * self.drift
        moved = rate * self.values.astype(np.float64, copy=False)
        moved += factor * rows.astype(np.float64) if self.drift else rows
        if self.drift:
            table *= table.dtype.type(factor)
        table[self.rows] = moved
        return table

    def __add__(self, other: SparseUpdate) -> SparseUpdate:
        """Both changes; the order of the operands does not matter beyond the last float64 digit."""
        rows = distinct(np.concatenate([self.rows, other.rows]))
        values = np.zeros((len(rows), *self.shape[1:]))
        values[np.searchsorted(rows, self.rows)] = self.values
        values[np.searchsorted(rows, other.rows)] += other.values
        return SparseUpdate(self.shape, rows, values, self.drift + other.drift)


Change: TypeAlias = "np.ndarray | SparseUpdate"


def added(one: Change, other: Change, table: np.ndarray) -> Change:
    """Sum of two changes of a table `[items, d]`, float64; it names rows when both do."""
    if isinstance(one, SparseUpdate) and isinstance(other, SparseUpdate):
        return one + other
    whole = (own.dense(table) if isinstance(own, SparseUpdate) else own for own in (one, other))
    return np.add(*whole, dtype=np.float64)  # without a float64 copy of each


def dense_change(change: Change, table: np.ndarray) -> np.ndarray:
    """A change as a whole table, `float64 [items, d]`."""
    return (
        change.dense(table)
        if isinstance(change, SparseUpdate)
        else change.astype(np.float64, copy=False)
    )


def scaled(change: Change, factor: float) -> Change:
    """A change multiplied by a factor."""
    if not isinstance(change, SparseUpdate):
        return change * factor
    return SparseUpdate(change.shape, change.rows, change.values * factor, change.drift * factor)


def apply_changes(
    theta: Mapping[str, np.ndarray], changes: Mapping[str, Change], rate: float
) -> dict[str, np.ndarray]:
    """Parameters plus `rate` times their changes.

    Tables whose change names rows are changed in place, so the cost does not depend on their size;
    those in shared memory also are. `theta` must not be used afterwards.
    """
    moved = {}
    for name, value in theta.items():
        change = changes[name]
        if isinstance(change, SparseUpdate):
            moved[name] = change.apply(value, rate)
        elif isinstance(value, SharedArray):  # nodes read the parameters in this memory
            _add(np.asarray(value).reshape(-1), rate, np.ascontiguousarray(change).reshape(-1))
            moved[name] = value
        else:
            moved[name] = (value + rate * change).astype(value.dtype, copy=False)
    return moved


def _add(values: np.ndarray, rate: float, changes: np.ndarray) -> None:
    """Add rate times changes in blocks, so that intermediate results stay in the caches."""
    for start in range(0, len(values), _PIECE):
        piece = slice(start, start + _PIECE)
        values[piece] += (rate * changes[piece]).astype(values.dtype)


class SparseAccumulator:
    """Running sum of changes to the rows of one table, float64; memory grows with the rows that are
    touched.

    Args:
        shape: shape of the table.

    Attributes:
        values: `float64 [N, d]`, the sums; another array when more rows are touched.
        rows: `int64 [N]`, the row of each sum.
        used: number of used sums; the others are 0.
        slots: `int64 [rows of the table]`, where each row's sum is; -1 for none.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.drift = 0.0
        self.slots = np.full(shape[0], -1, dtype=np.int64)
        self.rows = np.empty(0, dtype=np.int64)
        self.values = np.zeros((0, *shape[1:]))
        self.used = 0

    def add(self, rows: np.ndarray, values: np.ndarray, drift: float = 0.0) -> None:
        """Add `[n, d]` to rows `int64 [n]`, which may repeat."""
        self.drift += drift
        slots = torch.from_numpy(self.slots_of(rows))
        # deterministic order, and fast
        torch.from_numpy(self.values).index_add_(0, slots, torch.from_numpy(values))

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Where the sums of rows `int64 [n]` are, `int64 [n]`; rows without a sum get one."""
        fresh = distinct(rows[self.slots[rows] < 0])
        self.reserve(len(fresh))
        self.slots[fresh] = np.arange(self.used, self.used + len(fresh))
        self.rows[self.used : self.used + len(fresh)] = fresh
        self.used += len(fresh)
        return self.slots[rows]

    def total(self, kind: np.dtype | None = None) -> SparseUpdate:
        """The sum so far, as rows `int64 [R]` and values `[R, d]`, `float64` unless of a `kind`."""
        order = np.argsort(self.rows[: self.used])
        values = self.values[: self.used][order]
        if kind is not None:
            values = values.astype(kind, copy=False)
        rows = self.rows[: self.used][order]
        return SparseUpdate(self.shape, rows, values, self.drift)

    def change(self, table: np.ndarray) -> Change:
        """The sum so far as a change of the table `[items, d]`, in its type; sparse if less than
        half of the rows changed."""
        if 2 * self.used < len(table):
            return self.total(table.dtype)
        if self.drift:
            return self.total().dense(table).astype(table.dtype)
        whole = np.zeros(self.shape, dtype=table.dtype)
        whole[self.rows[: self.used]] = self.values[: self.used]  # in the table's type
        return whole

    def reserve(self, more: int) -> None:
        """Reserve memory for additional rows, at most for all rows of the table."""
        size = min(self.used + more, self.shape[0])
        if size <= len(self.rows):
            return
        grown = min(max(size, 2 * len(self.rows)), self.shape[0])
        if math.prod(self.shape) <= _RESERVED:  # what is not touched takes no memory
            grown = self.shape[0]
        rows = np.empty(grown, dtype=np.int64)
        values = np.zeros((grown, *self.shape[1:]))
        rows[: self.used] = self.rows[: self.used]
        values[: self.used] = self.values[: self.used]
        self.rows = rows
        self.values = values
