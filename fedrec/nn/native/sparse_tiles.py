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
    BLOCK,
    FLOAT,
    INTEGER,
    WIDE,
    load_vector,
    multiply_add,
    pointer,
    repeated,
    store_vector,
)

_VECTOR = 16 if WIDE else 8
_ZEROS = ir.Constant(ir.VectorType(FLOAT, _VECTOR), [0.0] * _VECTOR)


def nonzero_row(bits: int, width: int) -> Any:
    """Makes a function that adds alpha a b to `width` numbers of a row of the result, for a row a
    of `bits` numbers.

    Its arguments: alpha; address of a; address of b and numbers from row to row; address of the row
    of the result.
    """

    def add_nonzero_row(typing, alpha, a, b, b_row, out):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            alpha, a, b, b_row, out = arguments

            def step(place: Any, sums: Sequence[Any]) -> list[Any]:
                factor = repeated(builder, builder.load(pointer(builder, a, place)), _VECTOR)
                rows = _vectors(builder, b, builder.mul(place, b_row), width)
                return [
                    multiply_add(builder, factor, load_vector(builder, row, _VECTOR), total)
                    for row, total in zip(rows, sums, strict=True)
                ]

            mask = _mask(builder, a, bits, "!=")
            sums = _over_bits(builder, mask, [_ZEROS] * (width // _VECTOR), step)
            factor = repeated(builder, alpha, _VECTOR)
            places = _vectors(builder, out, ir.Constant(INTEGER, 0), width)
            for place, total in zip(places, sums, strict=True):
                before = load_vector(builder, place, _VECTOR)
                store_vector(builder, multiply_add(builder, factor, total, before), place)
            return context.get_dummy_value()

        return types.void(alpha, a, b, b_row, out), generate

    add_nonzero_row.__name__ = f"add_nonzero_row_{bits}_{width}"  # see `tiles.tile`
    return intrinsic(add_nonzero_row)


def positive_dots(bits: int, width: int) -> Any:
    """Makes a function that adds inner products of one row with `bits` others, over `width`
    numbers, where another number is positive.

    Its arguments: address of the `bits` numbers that decide; address of the row; address of the
    others and numbers from row to row; address of the `bits` results.
    """

    def add_positive_dots(typing, deciding, a, b, b_row, out):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            deciding, a, b, b_row, out = arguments
            start = ir.Constant(INTEGER, 0)
            own = [
                load_vector(builder, place, _VECTOR) for place in _vectors(builder, a, start, width)
            ]

            def step(place: Any, nothing: Sequence[Any]) -> list[Any]:
                total = _ZEROS
                rows = _vectors(builder, b, builder.mul(place, b_row), width)
                for one, row in zip(own, rows, strict=True):
                    other = load_vector(builder, row, _VECTOR)
                    total = multiply_add(builder, one, other, total)
                target = pointer(builder, out, place)
                added = builder.fadd(builder.load(target), _sum(builder, total))
                builder.store(added, target, align=4)
                return []

            _over_bits(builder, _mask(builder, deciding, bits, ">"), [], step)
            return context.get_dummy_value()

        return types.void(deciding, a, b, b_row, out), generate

    add_positive_dots.__name__ = f"add_positive_dots_{bits}_{width}"
    return intrinsic(add_positive_dots)


def _vectors(builder: ir.IRBuilder, address: Any, offset: Any, width: int) -> list[Any]:
    """Pointers to the vectors of `width` numbers that lie so many numbers behind an address."""
    return [
        pointer(builder, address, offset, ir.Constant(INTEGER, start))
        for start in range(0, width, _VECTOR)
    ]


def _mask(builder: ir.IRBuilder, address: Any, bits: int, relation: str) -> Any:
    """A word with a bit for each number that has the relation to zero; NaN has every one."""
    word = ir.IntType(bits)
    zeros = ir.Constant(ir.VectorType(FLOAT, BLOCK), [0.0] * BLOCK)
    mask = ir.Constant(word, 0)
    for start in range(0, bits, BLOCK):
        numbers = load_vector(
            builder, pointer(builder, address, ir.Constant(INTEGER, start)), BLOCK
        )
        found = builder.fcmp_unordered(relation, numbers, zeros)
        part = builder.zext(builder.bitcast(found, ir.IntType(BLOCK)), word)
        mask = builder.or_(mask, builder.shl(part, ir.Constant(word, start)))
    return mask


def _over_bits(
    builder: ir.IRBuilder,
    mask: Any,
    start: Sequence[Any],
    step: Callable[[Any, Sequence[Any]], Sequence[Any]],
) -> list[Any]:
    """A loop over the set bits of a word, which changes some values; they, after the loop.

    Args:
        start: the values before it.
        step: generates a step, given the place of the bit and the values; gives them after it.
    """
    word = mask.type
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
    builder.cbranch(builder.icmp_unsigned("!=", left, ir.Constant(word, 0)), body, after)
    builder.position_at_end(body)
    place = builder.cttz(left, ir.Constant(ir.IntType(1), 1))
    following = step(builder.zext(place, INTEGER) if word.width < 64 else place, values)
    for value, new in zip(values, following, strict=True):
        value.add_incoming(new, builder.block)
    lower = builder.sub(left, ir.Constant(word, 1))
    left.add_incoming(builder.and_(left, lower), builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def _sum(builder: ir.IRBuilder, vector: Any) -> Any:
    """The sum of a vector's numbers, in any order."""
    name = f"llvm.vector.reduce.fadd.v{_VECTOR}f32"
    given = builder.module.globals.get(name)
    if given is None:
        given = ir.Function(builder.module, ir.FunctionType(FLOAT, [FLOAT, vector.type]), name)
    return builder.call(given, [ir.Constant(FLOAT, 0.0), vector], fastmath=("reassoc",))
