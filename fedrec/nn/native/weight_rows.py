# SPDX-License-Identifier: Apache-2.0
"""Rows of weights that all examples multiply by one number each: inner products with them, and
their step.

Each weight is used once, so the time is that of reading and writing it. Some rows are taken
together, in LLVM instructions, and what they share is read and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from fedrec.nn.native.tiles import (
    FLOAT,
    INTEGER,
    VECTOR,
    WIDE,
    load_vector,
    loop,
    multiply_add,
    pointer,
    repeated,
    store_vector,
    sums_of_two,
)
from fedrec.runtime.compilation import FAST, INNER

TOGETHER = 8 if WIDE else 4
"""Rows that are taken together; two numbers for each of them fill half of the registers."""


@njit(**FAST)
def row_dots(rows, vector, out):
    """Inner products `[n]` of rows `[n, columns]` with a vector.

    Args:
        rows: `TOGETHER` rows or one.
        vector: `float32 [columns]`.
        out: `float32 [n]`, written.
    """
    first = _in_vectors(len(rows), vector.size)
    out[:] = 0
    if first:
        at = rows.ctypes.data, vector.size, vector.ctypes.data
        _dots(*at, first, out.ctypes.data)  # pyright: ignore[reportCallIssue]
    for n in range(len(rows)):
        row = rows[n]
        total = np.float32(0)
        for column in range(first, vector.size):
            total += row[column] * vector[column]
        out[n] += total


@njit(**FAST)
def move_and_sum(rows, factors, vector, shares, total):
    """rows += factors vector, and then total += shares rows.

    Args:
        rows: see `row_dots`.
        factors: `float32 [n]`.
        vector: `float32 [columns]`.
        shares: `float32 [n]`.
        total: `float32 [columns]`.
    """
    first = _in_vectors(len(rows), vector.size)
    if first:
        at = rows.ctypes.data, vector.size, factors.ctypes.data, vector.ctypes.data
        of_sums = shares.ctypes.data, total.ctypes.data
        _move_and_sum(*at, *of_sums, first)  # pyright: ignore[reportCallIssue]
    for n in range(len(rows)):
        row = rows[n]
        for column in range(first, vector.size):
            row[column] += factors[n] * vector[column]
            total[column] += shares[n] * row[column]


@njit(**INNER)
def _in_vectors(rows, columns):
    """Number of columns that are taken as whole vectors."""
    return columns - columns % VECTOR if rows == TOGETHER else 0


@intrinsic
def _dots(typing, rows, row, vector, columns, out):
    """Inner products of `TOGETHER` rows with a vector.

    Arguments: address of the rows and numbers from row to row; address of the vector; number of
    columns, a multiple of `VECTOR` above 0; address of the results.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, row, vector, columns, out = arguments
        zeros = ir.Constant(ir.VectorType(FLOAT, VECTOR), [0.0] * VECTOR)

        def step(column: Any, totals: Sequence[Any]) -> list[Any]:
            own = load_vector(builder, pointer(builder, vector, column), VECTOR)
            return [
                multiply_add(builder, load_vector(builder, place, VECTOR), own, total)
                for place, total in zip(_places(builder, rows, row, column), totals, strict=True)
            ]

        totals = loop(builder, columns, VECTOR, [zeros] * TOGETHER, step)
        for first in range(0, TOGETHER, 2):
            for number, total in enumerate(sums_of_two(builder, *totals[first : first + 2]), first):
                place = pointer(builder, out, ir.Constant(INTEGER, number))
                builder.store(total, place, align=4)
        return context.get_dummy_value()

    return types.void(rows, row, vector, columns, out), generate


@intrinsic
def _move_and_sum(typing, rows, row, factors, vector, shares, total, columns):
    """rows += factors vector, and then total += shares rows, for `TOGETHER` rows.

    Arguments: address of the rows and numbers from row to row; addresses of the factors, of the
    vector, of the shares and of the total; number of columns, a multiple of `VECTOR` above 0.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, row, factors, vector, shares, total, columns = arguments
        each = [ir.Constant(INTEGER, number) for number in range(TOGETHER)]
        own = [repeated(builder, builder.load(pointer(builder, factors, n)), VECTOR) for n in each]
        parts = [repeated(builder, builder.load(pointer(builder, shares, n)), VECTOR) for n in each]

        def step(column: Any, nothing: Sequence[Any]) -> list[Any]:
            direction = load_vector(builder, pointer(builder, vector, column), VECTOR)
            place = pointer(builder, total, column)
            summed = load_vector(builder, place, VECTOR)
            places = _places(builder, rows, row, column)
            for at, factor, part in zip(places, own, parts, strict=True):
                before = load_vector(builder, at, VECTOR)
                moved = multiply_add(builder, factor, direction, before)
                store_vector(builder, moved, at)
                summed = multiply_add(builder, part, moved, summed)
            store_vector(builder, summed, place)
            return []

        loop(builder, columns, VECTOR, [], step)
        return context.get_dummy_value()

    return types.void(rows, row, factors, vector, shares, total, columns), generate


def _places(builder: ir.IRBuilder, rows: Any, row: Any, column: Any) -> list[Any]:
    """Pointers to the numbers of a column."""
    each = [builder.mul(row, ir.Constant(INTEGER, number)) for number in range(TOGETHER)]
    return [pointer(builder, rows, offset, column) for offset in each]
