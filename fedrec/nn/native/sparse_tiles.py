# SPDX-License-Identifier: Apache-2.0
"""Pieces of matrix products that leave out zeros, as LLVM instructions.

About half of a layer's outputs are zero after ReLU. A piece is a part of one row: which of its
numbers are not zero is a word of bits, and a loop goes from one set bit to the next, so that a zero
takes no time. As in `fedrec.nn.native.tiles`, what all steps of the loop share is in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
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
