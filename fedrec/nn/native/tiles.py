# SPDX-License-Identifier: Apache-2.0
"""Pieces of matrix products in vector registers, as LLVM instructions.

In loops over arrays the compiler decides which numbers stay in registers, and in a product this
determines the speed. Here it is explicit: one tile of the result stays in registers during the loop
over the inner dimension. LLVM maps vectors of any length to those of the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

FLOAT = ir.FloatType()
INTEGER = ir.IntType(64)
"""Type of addresses and counts."""

WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))
"""Whether vectors have 16 numbers and there are 32 of them; otherwise 8 and 16."""
VECTOR = 16 if WIDE else 8
"""Numbers of a vector."""
ROWS = 8 if WIDE else 6
"""Rows of the largest tile, whose numbers and one row of the second factor fill the registers."""
BLOCK = 8
"""Rows and columns of the blocks that are transposed at once."""


def pointer(builder: ir.IRBuilder, address: Any, *offsets: Any) -> Any:
    """A pointer to the number that lies so many numbers behind an address."""
    place = builder.inttoptr(address, FLOAT.as_pointer())
    for offset in offsets:
        place = builder.gep(place, [offset])
    return place


def load_vector(builder: ir.IRBuilder, place: Any, width: int) -> Any:
    """The numbers from a pointer on."""
    vector = ir.VectorType(FLOAT, width)
    return builder.load(builder.bitcast(place, vector.as_pointer()), align=4)


def store_vector(builder: ir.IRBuilder, value: Any, place: Any) -> None:
    """Write a vector to where a pointer points."""
    builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=4)


def repeated(builder: ir.IRBuilder, value: Any, width: int) -> Any:
    """A vector of one number."""
    vector = ir.VectorType(FLOAT, width)
    single = builder.insert_element(
        ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), zeros)


def multiply_add(builder: ir.IRBuilder, one: Any, other: Any, total: Any) -> Any:
    """total + one * other, in one instruction where the processor has it."""
    free: Any = {"flags": ("contract",)}
    return builder.fadd(total, builder.fmul(one, other, **free), **free)


def sums_of_two(builder: ir.IRBuilder, one: Any, other: Any) -> list[Any]:
    """The sum of the numbers of each of two vectors, in any order."""

    def shuffled(first: Any, second: Any, places: Sequence[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(places)), list(places))
        return builder.shuffle_vector(first, second, mask)

    quarters = range(0, VECTOR, 4)  # a processor shuffles quickly among four numbers
    low = [place for n in quarters for place in (n, VECTOR + n, n + 1, VECTOR + n + 1)]
    high = [place for n in quarters for place in (n + 2, VECTOR + n + 2, n + 3, VECTOR + n + 3)]
    found = builder.fadd(shuffled(one, other, low), shuffled(one, other, high))
    length = VECTOR
    while length > 2:
        length //= 2
        halves = [shuffled(found, found, range(n, n + length)) for n in (0, length)]
        found = builder.fadd(*halves)
    places = [ir.Constant(ir.IntType(32), n) for n in range(2)]
    return [builder.extract_element(found, place) for place in places]


def loop(
    builder: ir.IRBuilder,
    end: Any,
    stride: int,
    start: Sequence[Any],
    step: Callable[[Any, Sequence[Any]], Sequence[Any]],
) -> Sequence[Any]:
    """A loop over 0, stride and so on below an end above 0, which changes some values; they, after
    the loop.

    Args:
        start: the values before it.
        step: generates a step, given the number and the values; gives them after it.
    """
    before = builder.block
    body = builder.append_basic_block("loop")
    after = builder.append_basic_block("loop.done")
    builder.branch(body)
    builder.position_at_end(body)
    number = builder.phi(INTEGER)
    number.add_incoming(ir.Constant(INTEGER, 0), before)
    values = [builder.phi(value.type) for value in start]
    for value, first in zip(values, start, strict=True):
        value.add_incoming(first, before)
    found = step(number, values)
    for value, new in zip(values, found, strict=True):
        value.add_incoming(new, body)
    following = builder.add(number, ir.Constant(INTEGER, stride))
    number.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, end), body, after)
    builder.position_at_end(after)
    return found


def tile(rows: int, width: int) -> Any:
    """Makes a function that adds alpha a b to a tile `[rows, width]` of the result.

    Its arguments: alpha; the inner dimension; address of a, numbers from a row of a to the next,
    and from a column to the next; address of b and numbers from row to row; address of the tile and
    numbers from row to row.
    """

    def add_tile(typing, alpha, inner, a, a_row, a_column, b, b_row, out, out_row):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            alpha, inner, a, a_row, a_column, b, b_row, out, out_row = arguments
            zeros = ir.Constant(ir.VectorType(FLOAT, width), [0.0] * width)
            each = [ir.Constant(INTEGER, row) for row in range(rows)]

            def step(number: Any, sums: Sequence[Any]) -> list[Any]:
                own = load_vector(builder, pointer(builder, b, builder.mul(number, b_row)), width)
                column = builder.mul(number, a_column)
                places = [pointer(builder, a, column, builder.mul(a_row, row)) for row in each]
                return [
                    multiply_add(builder, repeated(builder, builder.load(place), width), own, total)
                    for place, total in zip(places, sums, strict=True)
                ]

            sums = loop(builder, inner, 1, [zeros] * rows, step)
            factor = repeated(builder, alpha, width)
            for row, total in zip(each, sums, strict=True):
                place = pointer(builder, out, builder.mul(out_row, row))
                before = load_vector(builder, place, width)
                store_vector(builder, multiply_add(builder, factor, total, before), place)
            return context.get_dummy_value()

        return types.void(alpha, inner, a, a_row, a_column, b, b_row, out, out_row), generate

    # A compiled function is known by the names of its arguments' types, and code from one process's
    # cache and another's is linked by these: tiles of one name would be taken for each other.
    add_tile.__name__ = f"add_tile_{rows}_{width}"
    return intrinsic(add_tile)


@intrinsic
def transpose_block(typing, source, source_row, target, target_row):
    """Transpose a block of `BLOCK` rows and columns: addresses, and numbers from row to row."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, source_row, target, target_row = arguments
        places = [ir.Constant(INTEGER, row) for row in range(BLOCK)]
        rows = [
            load_vector(builder, pointer(builder, source, builder.mul(source_row, place)), BLOCK)
            for place in places
        ]
        mixed = ir.VectorType(ir.IntType(32), BLOCK)
        halves = [
            [BLOCK * (i % 2) + start + i // 2 for i in range(BLOCK)] for start in (0, BLOCK // 2)
        ]
        # interleaving rows with those half a block away transposes in the end
        for _ in range(BLOCK.bit_length() - 1):
            pairs = zip(rows[: BLOCK // 2], rows[BLOCK // 2 :], strict=True)
            rows = [
                builder.shuffle_vector(*pair, ir.Constant(mixed, half))
                for pair in pairs
                for half in halves
            ]
        for row, place in zip(rows, places, strict=True):
            store_vector(builder, row, pointer(builder, target, builder.mul(target_row, place)))
        return context.get_dummy_value()

    return types.void(source, source_row, target, target_row), generate
