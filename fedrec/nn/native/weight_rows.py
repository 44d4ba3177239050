# SPDX-License-Identifier: Apache-2.0
"""Rows of weights that all examples multiply by one number each: inner products with them, and
their step.

Each weight is used once, so the time is that of reading and writing it. Some rows are taken
together, in LLVM instructions, and what they share is read and written once.
"""

from __future__ import annotations

from collections.abc import Callable
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
    multiply_add,
    pointer,
    repeated,
    store_vector,
    sums_of_two,
)
from fedrec.runtime.compilation import FAST

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
    first = 0
    if len(rows) == TOGETHER and vector.size >= VECTOR:
        first = vector.size - vector.size % VECTOR
        at = rows.ctypes.data, vector.size, vector.ctypes.data
        _dots(*at, first, out.ctypes.data)  # pyright: ignore[reportCallIssue]
    else:
        out[:] = 0
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
    first = 0
    if len(rows) == TOGETHER and vector.size >= VECTOR:
        first = vector.size - vector.size % VECTOR
        at = rows.ctypes.data, vector.size, factors.ctypes.data, vector.ctypes.data
        of_sums = shares.ctypes.data, total.ctypes.data
        _move_and_sum(*at, *of_sums, first)  # pyright: ignore[reportCallIssue]
    for n in range(len(rows)):
        row = rows[n]
        for column in range(first, vector.size):
            row[column] += factors[n] * vector[column]
            total[column] += shares[n] * row[column]


@intrinsic
def _dots(typing, rows, row, vector, columns, out):
    """Inner products of `TOGETHER` rows with a vector.

    Arguments: address of the rows and numbers from row to row; address of the vector; number of
    columns, a multiple of `VECTOR` above 0; address of the results.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, row, vector, columns, out = arguments
        zeros = ir.Constant(ir.VectorType(FLOAT, VECTOR), [0.0] * VECTOR)

        def step(column: Any, totals: list[Any]) -> list[Any]:
            own = load_vector(builder, pointer(builder, vector, column), VECTOR)
            return [
                multiply_add(builder, load_vector(builder, place, VECTOR), own, total)
                for place, total in zip(_places(builder, rows, row, column), totals, strict=True)
            ]

        totals = _over_columns(builder, columns, [zeros] * TOGETHER, step)
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

        def step(column: Any, nothing: list[Any]) -> list[Any]:
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

        _over_columns(builder, columns, [], step)
        return context.get_dummy_value()

    return types.void(rows, row, factors, vector, shares, total, columns), generate


def _places(builder: ir.IRBuilder, rows: Any, row: Any, column: Any) -> list[Any]:
    """Pointers to the numbers of a column."""
    each = [builder.mul(row, ir.Constant(INTEGER, number)) for number in range(TOGETHER)]
    return [pointer(builder, rows, offset, column) for offset in each]


def _over_columns(
    builder: ir.IRBuilder,
    columns: Any,
    start: list[Any],
    step: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """A loop over vectors of columns, which changes some values; they, after the loop.

    Args:
        start: the values before it.
        step: generates a step, given the first column and the values; gives them after it.
    """
    before = builder.block
    body = builder.append_basic_block("columns")
    after = builder.append_basic_block("columns.done")
    builder.branch(body)
    builder.position_at_end(body)
    column = builder.phi(INTEGER)
    column.add_incoming(ir.Constant(INTEGER, 0), before)
    values = [builder.phi(value.type) for value in start]
    for value, first in zip(values, start, strict=True):
        value.add_incoming(first, before)
    found = step(column, values)
    for value, new in zip(values, found, strict=True):
        value.add_incoming(new, body)
    following = builder.add(column, ir.Constant(INTEGER, VECTOR))
    column.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, columns), body, after)
    builder.position_at_end(after)
    return found
