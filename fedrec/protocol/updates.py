# SPDX-License-Identifier: Apache-2.0
"""Sent form of updates (changed rows only, symmetric matrices by halves), and their size; arrays of
single clients in one message."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from fedrec.runtime.ragged import add_prefix, distinct, spans, strip_prefix
from fedrec.runtime.shared_memory import SharedArray

# Sparse updates of tables with one row per item: sums that contain only the changed rows.

_PIECE = 2**14  # numbers
_RESERVED = 2**27  # numbers of a table that may be reserved at once


@dataclass(frozen=True, eq=False)
class SparseUpdate:
    """Change of some rows of a table `[items, d]`.

    Attributes:
        shape: shape of the table.
        rows: `int64 [R]`, ascending, distinct.
        values: `[R, d]`.
    """

    shape: tuple[int, ...]
    rows: np.ndarray
    values: np.ndarray

    def dense(self) -> np.ndarray:
        """Return the change as a whole table, `float64 [items, d]`."""
        whole = np.zeros(self.shape)
        whole[self.rows] = self.values
        return whole

    def apply(self, table: np.ndarray, rate: float) -> np.ndarray:
        """Add `rate` times the change to a table `[items, d]`, in place; returns the table."""
        moved = rate * self.values.astype(np.float64, copy=False)
        table[self.rows] = moved + np.asarray(table)[self.rows]
        return table

    def __add__(self, other: SparseUpdate) -> SparseUpdate:
        """Add two changes; the order matters in the last float64 digit only."""
        rows = distinct(np.concatenate([self.rows, other.rows]))
        values = np.zeros((len(rows), *self.shape[1:]))
        values[np.searchsorted(rows, self.rows)] = self.values
        values[np.searchsorted(rows, other.rows)] += other.values
        return SparseUpdate(self.shape, rows, values)


Change: TypeAlias = "np.ndarray | SparseUpdate"


def added(first: Change, second: Change) -> Change:
    """Sum of two changes of a table `[items, d]`, float64; sparse if both are."""
    if isinstance(first, SparseUpdate) and isinstance(second, SparseUpdate):
        return first + second
    dense = (c.dense() if isinstance(c, SparseUpdate) else c for c in (first, second))
    return np.add(*dense, dtype=np.float64)  # without a float64 copy of each


def dense_change(change: Change) -> np.ndarray:
    """Return a change as a whole table, `float64 [items, d]`."""
    if isinstance(change, SparseUpdate):
        return change.dense()
    return change.astype(np.float64, copy=False)


def numbers_in(change: Change) -> np.ndarray:
    """Numbers that a change adds, `[...]`, which have its norm."""
    return change.values if isinstance(change, SparseUpdate) else change


def scaled(changes: Mapping[str, Change], factor: float) -> dict[str, Change]:
    """Multiply the changes of some parameters by a factor."""
    if factor == 1:
        return dict(changes)
    return {name: _scaled(change, factor) for name, change in changes.items()}


def _scaled(change: Change, factor: float) -> Change:
    if not isinstance(change, SparseUpdate):
        return change * factor
    return SparseUpdate(change.shape, change.rows, change.values * factor)


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
    """Running sum of changes to rows of a table, float64; memory grows with the rows touched.

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
        self.slots = np.full(shape[0], -1, dtype=np.int64)
        self.rows = np.empty(0, dtype=np.int64)
        self.values = np.zeros((0, *shape[1:]))
        self.used = 0

    def add(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Add `[n, d]` to rows `int64 [n]`, which may repeat."""
        slots = torch.from_numpy(self.slots_of(rows))
        # deterministic order, and fast
        torch.from_numpy(self.values).index_add_(0, slots, torch.from_numpy(values))

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Indices `int64 [n]` of the sums of rows `int64 [n]`; rows without a sum get one."""
        fresh = distinct(rows[self.slots[rows] < 0])
        self.reserve(len(fresh))
        self.slots[fresh] = np.arange(self.used, self.used + len(fresh))
        self.rows[self.used : self.used + len(fresh)] = fresh
        self.used += len(fresh)
        return self.slots[rows]

    def total(self, kind: np.dtype | None = None) -> SparseUpdate:
        """Sum so far: rows `int64 [R]` and values `[R, d]` of type `kind` (default: `float64`)."""
        order = np.argsort(self.rows[: self.used])
        values = self.values[: self.used][order]
        if kind is not None:
            values = values.astype(kind, copy=False)
        rows = self.rows[: self.used][order]
        return SparseUpdate(self.shape, rows, values)

    def change(self, table: np.ndarray) -> Change:
        """Sum so far as a change of the table `[items, d]`, in its type; sparse if fewer than half
        of the rows changed."""
        if 2 * self.used < len(table):
            return self.total(table.dtype)
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


# Symmetric matrices by their numbers on and above the diagonal, row after row.

_Rows = TypeVar("_Rows", int, np.ndarray)


def numbers_of(rows: _Rows) -> _Rows:
    """Size of the triangle of a matrix with `rows` rows, an integer or `int64 [n]`."""
    return rows * (rows + 1) // 2


def upper(matrix: np.ndarray) -> np.ndarray:
    """Upper triangle of a matrix `[n, n]`, `[n (n + 1) / 2]`."""
    return matrix[_upper_mask(len(matrix))]


def mirrored(triangle: np.ndarray, rows: int) -> np.ndarray:
    """Symmetric matrix `[rows, rows]` with the upper triangle `[rows (rows + 1) / 2]`."""
    matrix = np.empty((rows, rows), dtype=triangle.dtype)
    mask = _upper_mask(rows)
    matrix[mask] = triangle
    matrix.T[mask] = triangle
    return matrix


def _upper_mask(rows: int) -> np.ndarray:
    return ~np.tri(rows, k=-1, dtype=bool)


# The form in which an array leaves a machine, and how many bytes it has: the only count of what is
# sent. Rows of zeros are left out, and of a symmetric matrix one half; the values are the same.
#
#     whole      all numbers of `[n, ...]`
#     rows       which rows are not zero, and their numbers
#     triangle   of a symmetric `[n, n]` the same, and of these rows and columns those on and above
#                the diagonal
#
# The shortest form is taken. Names, types and shapes of arrays, some hundred bytes a message, do
# not count.

ROW_BYTES = 8
"""Bytes of the number of a row."""
MOST_EXPANDED = 2**29
"""Largest number of bytes of an array that is sent in another form than whole, so that a short
message cannot take all memory."""
WHOLE = "fedrec.whole"
ROWS = "fedrec.rows"
TRIANGLE = "fedrec.triangle"
_Number = TypeVar("_Number", int, np.ndarray)
_LOOKED_AT = 64  # rows by which most arrays show that they are neither sparse nor symmetric


def network_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """Number of bytes of named arrays in a message."""
    return sum(_length(array, *_form(array)) for array in arrays.values())


def bytes_of_rows(rows: np.ndarray, row: int, whole: int) -> np.ndarray:
    """Number of bytes of arrays with some non-zero rows, from the numbers of these rows.

    Args:
        rows: `int64 [n]`, the number of these rows in each array.
        row: bytes of a row.
        whole: bytes of a whole array.

    Returns:
        `int64 [n]`.
    """
    return np.minimum(whole, _rows_length(rows, row))


def bytes_of_triangle(rows: np.ndarray, number: int, whole: int) -> np.ndarray:
    """Number of bytes of symmetric matrices with some non-zero rows and columns.

    Args:
        rows: `int64 [n]`, the number of these rows in each matrix.
        number: bytes of a number.
        whole: bytes of a whole matrix.

    Returns:
        `int64 [n]`.
    """
    return np.minimum(whole, _triangle_length(rows, number))


def compacted(array: np.ndarray) -> tuple[str, bytes]:
    """Encode an array `[...]` in its shortest form: its name with the number of rows, and bytes."""
    form, rows = _form(array)
    if form == WHOLE:
        return form, np.ascontiguousarray(array).tobytes()
    some = array[rows]
    if form == TRIANGLE:
        some = upper(some[:, rows])
    values = np.ascontiguousarray(some).tobytes()
    return f"{form} {len(rows)}", rows.astype("<i8").tobytes() + values


def expanded(form: str, data: bytes, kind: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Decode an array `[...]` from its bytes, which are untrusted input.

    Args:
        form: name of the form, with the number of rows unless it is `WHOLE`.
        data: its bytes.
        kind: type of the array.
        shape: its shape.

    Raises:
        ValueError: they do not fit together.
    """
    if kind.kind not in "biuf" or any(length < 0 for length in shape):
        raise ValueError(f"invalid type {kind} or shape {shape} of an array")
    if form == WHOLE:
        return np.frombuffer(data, kind).reshape(shape).copy()
    form, _, number = form.partition(" ")
    size = math.prod(shape) * kind.itemsize
    square = len(shape) == 2 and shape[0] == shape[1]
    if not shape or size > MOST_EXPANDED or (form != ROWS and not (form == TRIANGLE and square)):
        raise ValueError(f"invalid form {form!r} of an array with shape {shape}")
    count = int(number)
    row = math.prod(shape[1:]) * kind.itemsize
    length = _rows_length(count, row) if form == ROWS else _triangle_length(count, kind.itemsize)
    if not 0 <= count <= shape[0] or len(data) != length:
        raise ValueError(f"{len(data)} bytes do not match {count} rows of {shape}")
    rows = np.frombuffer(data[: count * ROW_BYTES], "<i8")
    values = np.frombuffer(data[count * ROW_BYTES :], kind)
    if count and (rows[0] < 0 or rows[-1] >= shape[0] or (np.diff(rows) <= 0).any()):
        raise ValueError(f"row numbers are not ascending and below {shape[0]}")
    array = np.zeros(shape, kind)
    if form == ROWS:
        array[rows] = values.reshape(count, *shape[1:])
    else:
        array[np.ix_(rows, rows)] = mirrored(values, count)
    return array


def _form(array: np.ndarray) -> tuple[str, np.ndarray]:
    """Shortest form of an array, and its non-zero rows, `int64 [n]`."""
    none = np.empty(0, dtype=np.int64)
    plain = array.ndim and array.size and array.nbytes <= MOST_EXPANDED
    if not plain or array.dtype.kind != "f" or not (_sparse(array) or _symmetric(array)):
        return WHOLE, none
    rows = np.flatnonzero(array.reshape(len(array), -1).any(1))
    forms = [WHOLE, ROWS, *([TRIANGLE] if _symmetric(array) else [])]
    return min(forms, key=lambda form: _length(array, form, rows)), rows


def _length(array: np.ndarray, form: str, rows: np.ndarray) -> int:
    if form == WHOLE:
        return array.nbytes
    if form == ROWS:
        return _rows_length(len(rows), array[:1].nbytes)
    return _triangle_length(len(rows), array.itemsize)


def _rows_length(rows: _Number, row: int) -> _Number:
    return rows * (ROW_BYTES + row)


def _triangle_length(rows: _Number, number: int) -> _Number:
    return rows * ROW_BYTES + numbers_of(rows) * number


def _sparse(array: np.ndarray) -> bool:
    """True if an array may have few non-zero rows, by a sample of the rows: reading all of a large
    table takes as long as a short round."""
    some = array[:: max(1, len(array) // _LOOKED_AT)]
    return not some.reshape(len(some), -1).any(1).all()


def _symmetric(array: np.ndarray) -> bool:
    if array.ndim != 2 or array.shape[0] != array.shape[1]:
        return False
    return np.array_equal(array[0], array[:, 0]) and np.array_equal(array, array.T)


# Arrays of single clients in one message: the parameters that a server generates for each of them,
# or the update of each. A client uses few items, so of item tables only the rows that it names or
# changes are sent. The rows of all clients of a message are concatenated, without padding.

_VALUE = "value/"
_ROW = "row/"


@dataclass(frozen=True, eq=False)
class ItemRequests:
    """Items whose rows some clients need.

    Attributes:
        clients: `int64 [C]`, ascending.
        offsets: `int64 [C + 1]`; client c needs `items[offsets[c]:offsets[c + 1]]`.
        items: `int64 [P]`, ascending and distinct for each client.
    """

    clients: np.ndarray
    offsets: np.ndarray
    items: np.ndarray

    @classmethod
    def of(cls, clients: np.ndarray, lists: Sequence[np.ndarray]) -> ItemRequests:
        """Make requests from one array of items `int64 [n]` per client, ascending and distinct."""
        offsets = np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int64)
        items = np.concatenate([np.empty(0, dtype=np.int64), *lists])
        return cls(np.asarray(clients, dtype=np.int64), offsets, items.astype(np.int64, copy=False))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return as named arrays."""
        return {"clients": self.clients, "offsets": self.offsets, "items": self.items}

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray]) -> ItemRequests:
        """Read named arrays returned by `arrays`."""
        return cls(arrays["clients"], arrays["offsets"], arrays["items"])

    @classmethod
    def concatenated(cls, parts: Sequence[ItemRequests]) -> ItemRequests:
        """Concatenate the clients of several parts."""
        none = np.empty(0, dtype=np.int64)
        clients = np.concatenate([none, *(part.clients for part in parts)])
        items = np.concatenate([none, *(part.items for part in parts)])
        counts = np.concatenate([none, *(np.diff(part.offsets) for part in parts)])
        return cls(clients, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), items)

    @classmethod
    def joined(cls, parts: Sequence[ItemRequests]) -> ItemRequests:
        """Join several parts; clients are ascending."""
        every = cls.concatenated(parts)
        return every.take(np.argsort(every.clients))

    @property
    def owners(self) -> np.ndarray:
        """Index in `clients` of the client of each item, `int64 [P]`."""
        return np.repeat(np.arange(len(self.clients)), np.diff(self.offsets))

    def rows_of(self, indices: np.ndarray) -> np.ndarray:
        """Indices `int64 [rows]` of the P rows of the clients at the given positions, in their
        order."""
        starts = self.offsets[indices]
        counts = self.offsets[indices + 1] - self.offsets[indices]
        return spans(starts, counts)

    def take(self, indices: np.ndarray) -> ItemRequests:
        """Select the clients at the given positions, `int64 [n]`."""
        counts = self.offsets[indices + 1] - self.offsets[indices]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return ItemRequests(self.clients[indices], offsets, self.items[self.rows_of(indices)])


@dataclass(frozen=True, eq=False)
class ClientArrays:
    """Parameters or updates of some clients.

    Attributes:
        requests: the clients, and the items of `rows`.
        values: `[C, ...]` per parameter, whole tables included.
        rows: `[P, ...]` per item table, for the requested items only.
    """

    requests: ItemRequests
    values: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    @classmethod
    def of(
        cls, requests: ItemRequests, tensors: Mapping[str, torch.Tensor], tables: Collection[str]
    ) -> ClientArrays:
        """Make from tensors: `[P, ...]` for tables with rows per client, `[C, ...]` for other
        parameters."""
        arrays = {name: value.numpy(force=True) for name, value in tensors.items()}
        rows = {name: arrays.pop(name) for name in tables}
        return cls(requests, arrays, rows)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return as named arrays."""
        return {**self.requests.arrays(), **add_prefix({_VALUE: self.values, _ROW: self.rows})}

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray]) -> ClientArrays:
        """Read named arrays returned by `arrays`."""
        return cls(
            ItemRequests.read(arrays), strip_prefix(_VALUE, arrays), strip_prefix(_ROW, arrays)
        )

    def take(self, indices: np.ndarray) -> ClientArrays:
        """Select the clients at the given positions, `int64 [n]`."""
        rows = self.requests.rows_of(indices)
        return ClientArrays(
            self.requests.take(indices),
            {name: value[indices] for name, value in self.values.items()},
            {name: value[rows] for name, value in self.rows.items()},
        )

    def arranged(self, indices: np.ndarray) -> ClientArrays:
        """Select like `take`, at positions `int64 [n]`, but without a copy if these are all clients
        in their order, as within one part."""
        in_order = np.array_equal(indices, np.arange(len(self.requests.clients)))
        return self if in_order else self.take(indices)

    @classmethod
    def joined(cls, parts: Sequence[ClientArrays]) -> ClientArrays:
        """Join several parts; clients are ascending, and missing parameters zero. A table with rows
        in one part and whole values in another becomes rows."""
        tables = {name for part in parts for name in part.rows}
        parts = [part._with_rows(tables & part.values.keys()) for part in parts]
        requests = ItemRequests.concatenated([part.requests for part in parts])
        order = np.argsort(requests.clients)
        counts = [len(part.requests.clients) for part in parts]
        values = _filled([part.values for part in parts], counts)
        rows = _filled([part.rows for part in parts], [len(p.requests.items) for p in parts])
        return cls(requests, values, rows).arranged(order)

    def _with_rows(self, names: Collection[str]) -> ClientArrays:
        """Convert whole tables to rows, so that all tables have rows."""
        if not names:
            return self
        count = len(self.values[next(iter(names))][0])
        clients = self.requests.clients
        requests = ItemRequests.of(clients, [np.arange(count)] * len(clients))
        rows = {name: self.values[name].reshape(-1, *self.values[name].shape[2:]) for name in names}
        values = {name: value for name, value in self.values.items() if name not in names}
        for name, value in self.rows.items():
            dense = np.zeros((len(clients), count, *value.shape[1:]), dtype=value.dtype)
            dense[self.requests.owners, self.requests.items] = value
            rows[name] = dense.reshape(-1, *value.shape[1:])
        return ClientArrays(requests, values, rows)

    def changes(self, name: str, table: np.ndarray) -> list[Change]:
        """Each client's update of one parameter, in the order of the clients; zero for a parameter
        that is not here.

        Args:
            name: the parameter.
            table: its value before, `[...]`, for the shape.
        """
        if name in self.values:
            return list(self.values[name])
        if name not in self.rows:
            return [np.zeros_like(table)] * len(self.requests.clients)
        ends = self.requests.offsets[1:-1]
        pairs = zip(
            np.split(self.requests.items, ends), np.split(self.rows[name], ends), strict=True
        )
        return [SparseUpdate(table.shape, items, rows) for items, rows in pairs]

    def padded(self, width: int) -> dict[str, np.ndarray]:
        """Pad each client's rows to `[C, width, ...]`; all parameters have a leading cohort
        dimension."""
        mask = self.real(width)
        filled = dict(self.values)
        for name, value in self.rows.items():
            filled[name] = np.zeros((*mask.shape, *value.shape[1:]), dtype=value.dtype)
            filled[name][mask] = value
        return filled

    def real(self, width: int) -> np.ndarray:
        """Mask `bool [C, width]` of the rows of `padded` that are not padding."""
        return np.arange(width) < np.diff(self.requests.offsets)[:, None]


def _filled(
    parts: Sequence[Mapping[str, np.ndarray]], counts: Sequence[int]
) -> dict[str, np.ndarray]:
    """Concatenate the arrays of several parts, with zeros `[count, ...]` for missing ones."""
    like = {name: value for part in parts for name, value in part.items()}
    return {
        name: np.concatenate(
            [
                part.get(name, np.zeros((count, *value.shape[1:]), value.dtype))
                for part, count in zip(parts, counts, strict=True)
            ]
        )
        for name, value in like.items()
    }
