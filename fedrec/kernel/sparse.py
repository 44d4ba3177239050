# SPDX-License-Identifier: Apache-2.0
"""Products in compiled code that leave out the zeros after ReLU, and rows of weights that examples
share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from fedrec.kernel.products import (
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
    transpose,
)
from fedrec.kernel.rows import copy_row, matrix
from fedrec.runtime.compilation import FAST, INNER

# Pieces of matrix products that leave out zeros, as LLVM instructions.
#
# About half of a layer's outputs are zero after ReLU. A piece is a part of one row: which of its
# numbers are not zero is a word of bits, and a loop goes from one set bit to the next, so that a
# zero takes no time. As in `fedrec.kernel.products`, what all steps of the loop share is in
# registers.

_ZEROS = ir.Constant(ir.VectorType(FLOAT, VECTOR), [0.0] * VECTOR)


def nonzero_row(bits: int, width: int) -> Any:
    """Makes a function that adds a b to `width` numbers of a row of the result, for a row a of
    `bits` numbers.

    Its arguments: address of a; address of b and numbers from row to row; address of the row of the
    result.
    """

    def add_nonzero_row(typing, a, b, b_row, out):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, b, b_row, out = arguments

            def step(places: Sequence[Any], _: Any, sums: Sequence[Any]) -> list[Any]:
                place = places[0]
                factor = repeated(builder, builder.load(pointer(builder, a, place)), VECTOR)
                rows = _vectors(builder, b, builder.mul(place, b_row), width)
                return [
                    multiply_add(builder, factor, load_vector(builder, row, VECTOR), total)
                    for row, total in zip(rows, sums, strict=True)
                ]

            mask = _mask(builder, a, bits)
            sums = _over_bits(builder, mask, [_ZEROS] * (width // VECTOR), step, 1)
            places = _vectors(builder, out, ir.Constant(INTEGER, 0), width)
            for place, total in zip(places, sums, strict=True):
                before = load_vector(builder, place, VECTOR)
                store_vector(builder, builder.fadd(before, total), place)
            return context.get_dummy_value()

        return types.void(a, b, b_row, out), generate

    add_nonzero_row.__name__ = f"add_nonzero_row_{bits}_{width}"  # see `tiles.tile`
    return intrinsic(add_nonzero_row)


def descend_row(bits: int, width: int) -> Any:
    """Makes a function that adds the part of `bits` examples to the step of `width` weights of one
    input, and inner products of the weights before the step with rows of a gradient, for examples
    in which the input is not zero.

    Its arguments: the step size, negative; address of the input in the examples; address of the
    gradient's first row and numbers from row to row; addresses of the weights and of those before
    the step, which may be the same; address of the `bits` inner products.
    """

    def descend_nonzero_row(typing, alpha, a, gradient, gradient_row, weights, before, out):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            alpha, a, gradient, gradient_row, weights, before, out = arguments
            start = ir.Constant(INTEGER, 0)
            own = [
                load_vector(builder, place, VECTOR)
                for place in _vectors(builder, before, start, width)
            ]

            def step_of(multiplied: Sequence[Any]) -> Any:
                def step(places: Sequence[Any], counts: Sequence[Any], sums: Any) -> list[Any]:
                    offsets = [builder.mul(place, gradient_row) for place in places]
                    rows = [_vectors(builder, gradient, offset, width) for offset in offsets]
                    factors = _factors(builder, a, places, counts) if sums else []
                    dots, found = _passed(builder, rows, multiplied, factors, sums)
                    if multiplied:
                        _add_totals(builder, dots, out, places)
                    return found

                return step

            mask = _mask(builder, a, bits)
            zeros = [_ZEROS] * len(own)
            if WIDE:
                sums = _over_bits(builder, mask, zeros, step_of(own), 2)
            else:  # registers for one of them
                sums = _over_bits(builder, mask, zeros, step_of([]), 1)
                _over_bits(builder, mask, [], step_of(own), 2)
            factor = repeated(builder, alpha, VECTOR)
            for place, total in zip(_vectors(builder, weights, start, width), sums, strict=True):
                earlier = load_vector(builder, place, VECTOR)
                store_vector(builder, multiply_add(builder, factor, total, earlier), place)
            return context.get_dummy_value()

        given = (alpha, a, gradient, gradient_row, weights, before, out)
        return types.void(*given), generate

    descend_nonzero_row.__name__ = f"descend_nonzero_row_{bits}_{width}"
    return intrinsic(descend_nonzero_row)


def _factors(
    builder: ir.IRBuilder, address: Any, places: Sequence[Any], counts: Sequence[Any]
) -> list[Any]:
    """A vector of the number at each place, of zeros if it does not count."""
    found = []
    for place, count in zip(places, counts, strict=True):
        number = builder.load(pointer(builder, address, place))
        if count is not None:
            number = builder.select(count, number, ir.Constant(FLOAT, 0.0))
        found.append(repeated(builder, number, VECTOR))
    return found


def _passed(
    builder: ir.IRBuilder,
    rows: Sequence[Sequence[Any]],
    weights: Sequence[Any],
    factors: Sequence[Any],
    sums: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """What one pass over rows gives: vectors whose sums are the inner products of each row with the
    weights, if there are weights; and sums plus factors times rows, if there are factors."""
    # one chain of additions would take longer than all multiplications
    chains: list[list[Any]] = [[_ZEROS, _ZEROS] for _ in rows]
    found = list(sums)
    for column in range(len(rows[0])):
        for number, row in enumerate(rows):
            value = load_vector(builder, row[column], VECTOR)
            if factors:
                found[column] = multiply_add(builder, factors[number], value, found[column])
            if weights:
                chain = chains[number]
                chain.append(multiply_add(builder, weights[column], value, chain.pop(0)))
    return [builder.fadd(one, other) for one, other in chains], found


def _add_totals(
    builder: ir.IRBuilder, vectors: Sequence[Any], out: Any, places: Sequence[Any]
) -> None:
    """Add the sum of each of two vectors to a number; the two numbers may be one."""
    targets = [pointer(builder, out, place) for place in places]
    before = [builder.load(target) for target in targets]
    for target, number, total in zip(targets, before, sums_of_two(builder, *vectors), strict=True):
        builder.store(builder.fadd(number, total), target, align=4)


def _vectors(builder: ir.IRBuilder, address: Any, offset: Any, width: int) -> list[Any]:
    """Pointers to the vectors of `width` numbers that lie so many numbers behind an address."""
    return [
        pointer(builder, address, offset, ir.Constant(INTEGER, start))
        for start in range(0, width, VECTOR)
    ]


def _mask(builder: ir.IRBuilder, address: Any, bits: int) -> Any:
    """A word with a bit for each number that is not zero."""
    word = ir.IntType(bits)
    mask = ir.Constant(word, 0)
    for start in range(0, bits, VECTOR):
        place = pointer(builder, address, ir.Constant(INTEGER, start))
        found = builder.fcmp_unordered("!=", load_vector(builder, place, VECTOR), _ZEROS)
        part = builder.zext(builder.bitcast(found, ir.IntType(VECTOR)), word)
        mask = builder.or_(mask, builder.shl(part, ir.Constant(word, start)))
    return mask


def _over_bits(
    builder: ir.IRBuilder,
    mask: Any,
    start: Sequence[Any],
    step: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]],
    together: int,
) -> list[Any]:
    """A loop over the set bits of a word, some at a time, which changes some values; they, after
    the loop.

    Args:
        start: the values before it.
        step: generates a step, given the places of the bits, whether each counts (None: it does),
            and the values; gives them after it. If fewer bits are left, places of bits are
            repeated, which do not count.
        together: number of bits at a time.
    """
    word = mask.type
    none = ir.Constant(word, 0)
    before = builder.block
    head = builder.append_basic_block("bits")
    body = builder.append_basic_block("bits.body")
    after = builder.append_basic_block("bits.done")
    builder.branch(head)
    builder.position_at_end(head)
    left = builder.phi(word)
    left.add_incoming(mask, before)
    values = [builder.phi(value.type) for value in start]
    for value, first in zip(values, start, strict=True):
        value.add_incoming(first, before)
    builder.cbranch(builder.icmp_unsigned("!=", left, none), body, after)
    builder.position_at_end(body)
    rest = left
    last = left
    places: list[Any] = []
    counts: list[Any] = []
    for number in range(together):
        counts.append(builder.icmp_unsigned("!=", rest, none) if number else None)
        last = builder.select(counts[-1], rest, last) if number else rest
        place = builder.cttz(last, ir.Constant(ir.IntType(1), 1))
        places.append(builder.zext(place, INTEGER) if word.width < 64 else place)
        rest = builder.and_(rest, builder.sub(rest, ir.Constant(word, 1)))
    following = step(places, counts, values)
    for value, new in zip(values, following, strict=True):
        value.add_incoming(new, builder.block)
    left.add_incoming(rest, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


# Matrix products of a layer whose inputs are outputs of ReLU, with their zeros left out.
#
# Half of zeros makes them 1.5 to 1.6 times as fast as those of `fedrec.kernel.products` on a
# processor with vectors of 16 numbers, seven tenths 2.3 times.

_LONG = 64  # numbers of a row that are looked at together
_SHORT = 32  # the same of a batch, which is seldom longer
_NARROW = 64  # columns of the result that are in registers
_BROAD = 128 if WIDE else _NARROW
_LEAST_ZEROS = 0.4  # as a share; with fewer, other products are as fast
_OUTPUTS, _OUTPUTS_NARROW = (nonzero_row(_LONG, width) for width in (_BROAD, _NARROW))
_WEIGHTS, _WEIGHTS_NARROW = (descend_row(_SHORT, width) for width in (_BROAD, _NARROW))


@njit(**FAST)
def sparse_enough(inputs, columns, room):
    """Whether the functions below are for a layer: its inputs `[n, in]` have many zeros, the sizes
    are whole vectors, and the working memory holds what `descend_sparse` needs."""
    rows, width = inputs.shape
    if width % _LONG or columns % _NARROW or room_of_sparse(rows, width, columns) > room.size:
        return False
    flat = inputs.reshape(-1)
    zeros = np.int32(0)
    for i in range(flat.size):
        zeros += np.int32(flat[i] == 0)
    return zeros >= _LEAST_ZEROS * flat.size


@njit(**FAST)
def room_of_sparse(rows, width, columns):
    """Numbers in the working memory: inputs and their gradient, transposed, and the weights."""
    return width * (2 * _padded(rows) + columns)


@njit(**FAST)
def add_sparse_outputs(inputs, weights, out):
    """out += inputs weights, see `products.add_outputs`."""
    rows, inner = inputs.shape
    columns = out.shape[1]
    column = 0
    while column < columns:
        broad = columns - column >= _BROAD
        for first in range(0, inner, _LONG):
            of_weights = weights.ctypes.data + 4 * (first * columns + column)
            for row in range(rows):
                of_inputs = inputs.ctypes.data + 4 * (row * inner + first)
                to = out.ctypes.data + 4 * (row * columns + column)
                if broad:
                    _OUTPUTS(of_inputs, of_weights, columns, to)
                else:
                    _OUTPUTS_NARROW(of_inputs, of_weights, columns, to)
        column += _BROAD if broad else _NARROW


@njit(**FAST)
def descend_sparse(rate, inputs, gradient, weights, out, room):
    """out = gradient weights^T where the inputs are not zero, and 0 elsewhere: the gradient of what
    ReLU was applied to; and then weights -= rate inputs^T gradient. See `products.input_gradients`
    and `products.descend_weights`: both read the same rows of the gradient."""
    rows, width = inputs.shape
    columns = gradient.shape[1]
    padded = _padded(rows)
    turned = matrix(room, 0, width, padded)
    found = matrix(room, width * padded, width, padded)
    before = weights  # which the step of the first examples would change for the next ones
    if padded > _SHORT or rate == 0:
        before = matrix(room, 2 * width * padded, width, columns)
        copy_row(weights.reshape(-1), before.reshape(-1))
    found[:] = 0
    turned[:, rows:] = 0
    transpose(inputs, turned)
    column = 0
    while column < columns:
        broad = columns - column >= _BROAD
        for first in range(0, padded, _SHORT):
            of_gradient = gradient.ctypes.data + 4 * (first * columns + column)
            for number in range(width):
                of_inputs = turned.ctypes.data + 4 * (number * padded + first)
                place = 4 * (number * columns + column)
                own = weights.ctypes.data + place, before.ctypes.data + place
                to = found.ctypes.data + 4 * (number * padded + first)
                given = (-rate, of_inputs, of_gradient, columns, *own, to)
                if broad:
                    _WEIGHTS(*given)
                else:
                    _WEIGHTS_NARROW(*given)
        column += _BROAD if broad else _NARROW
    transpose(found, out)
    if rate == 0:  # 0 times infinity has been added
        copy_row(before.reshape(-1), weights.reshape(-1))


@njit(**INNER)
def _padded(rows):
    """Number of rows, rounded up to whole words."""
    return -(-rows // _SHORT) * _SHORT


# Rows of weights that all examples multiply by one number each: inner products with them, and their
# step.
#
# Each weight is used once, so the time is that of reading and writing it. Some rows are taken
# together, in LLVM instructions, and what they share is read and written once.

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
