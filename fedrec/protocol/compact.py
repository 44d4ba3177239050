# SPDX-License-Identifier: Apache-2.0
"""The form in which an array leaves a machine, and how many bytes it has: the only count of what is
sent. Rows of zeros are left out, and of a symmetric matrix one half; the values are the same.

    whole      all numbers of `[n, ...]`
    rows       which rows are not zero, and their numbers
    triangle   of a symmetric `[n, n]` the same, and of these rows and columns those on and above
               the diagonal

The shortest form is taken. Names, types and shapes of arrays, some hundred bytes a message, do not
count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from fedrec.protocol.triangle import mirrored, numbers_of, upper

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
    """Number of bytes that named arrays have in a message."""
    return sum(_length(array, *_form(array)) for array in arrays.values())


def bytes_of_rows(rows: np.ndarray, row: int, whole: int) -> np.ndarray:
    """The same of arrays that are not zero in some rows, without having them.

    Args:
        rows: `int64 [n]`, the number of these rows in each array.
        row: bytes of a row.
        whole: bytes of a whole array.

    Returns:
        `int64 [n]`.
    """
    return np.minimum(whole, _rows_length(rows, row))


def bytes_of_triangle(rows: np.ndarray, number: int, whole: int) -> np.ndarray:
    """The same of symmetric matrices that are not zero in some rows and the columns of these.

    Args:
        rows: `int64 [n]`, the number of these rows in each matrix.
        number: bytes of a number.
        whole: bytes of a whole matrix.

    Returns:
        `int64 [n]`.
    """
    return np.minimum(whole, _triangle_length(rows, number))


def compacted(array: np.ndarray) -> tuple[str, bytes]:
    """The name of the shortest form of an array `[...]`, and its bytes."""
    form, rows = _form(array)
    if form == WHOLE:
        return form, np.ascontiguousarray(array).tobytes()
    some = array[rows]
    if form == TRIANGLE:
        some = upper(some[:, rows])
    return form, rows.astype("<i8").tobytes() + np.ascontiguousarray(some).tobytes()


def expanded(form: str, data: bytes, kind: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The array `[...]` from its bytes, which are untrusted input.

    Args:
        form: name of the form.
        data: its bytes.
        kind: type of the array.
        shape: its shape.

    Raises:
        ValueError: they do not fit together.
    """
    if kind.kind not in "biuf" or any(length < 0 for length in shape):
        raise ValueError(f"an array of {kind} with shape {shape}")
    if form == WHOLE:
        return np.frombuffer(data, kind).reshape(shape).copy()
    size = math.prod(shape) * kind.itemsize
    if form not in (ROWS, TRIANGLE) or not shape or size > MOST_EXPANDED:
        raise ValueError(f"form {form!r} of an array with shape {shape}")
    row = math.prod(shape[1:]) * kind.itemsize
    count = _count(len(data), row) if form == ROWS else _side(len(data), kind.itemsize)
    rows = np.frombuffer(data[: count * ROW_BYTES], "<i8")
    values = np.frombuffer(data[count * ROW_BYTES :], kind)
    if count and (rows[0] < 0 or rows[-1] >= shape[0] or (np.diff(rows) <= 0).any()):
        raise ValueError(f"rows that are not ascending within {shape[0]}")
    found = np.zeros(shape, kind)
    if form == ROWS:
        found[rows] = values.reshape(count, *shape[1:])
        return found
    if shape != (shape[0], shape[0]):
        raise ValueError(f"a triangle of a matrix with shape {shape}")
    found[np.ix_(rows, rows)] = mirrored(values, count)
    return found


def _form(array: np.ndarray) -> tuple[str, np.ndarray]:
    """The shortest form of an array, and its rows that are not zero, `int64 [n]`."""
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
    """Whether rows of zeros may pay, by some of the rows: looking at all of a large table takes as
    long as a short round."""
    some = array[:: max(1, len(array) // _LOOKED_AT)]
    return not some.reshape(len(some), -1).any(1).all()


def _symmetric(array: np.ndarray) -> bool:
    if array.ndim != 2 or array.shape[0] != array.shape[1]:
        return False
    return np.array_equal(array[0], array[:, 0]) and np.array_equal(array, array.T)


def _count(length: int, row: int) -> int:
    """The number of rows in so many bytes."""
    count, rest = divmod(length, ROW_BYTES + row)
    if rest:
        raise ValueError(f"{length} bytes of rows of {row}")
    return count


def _side(length: int, number: int) -> int:
    """The number of rows of a triangle of so many bytes."""
    linear = ROW_BYTES + number / 2
    count = round((math.sqrt(linear**2 + 2 * number * length) - linear) / number)
    if _triangle_length(count, number) != length:
        raise ValueError(f"{length} bytes of a triangle")
    return count
