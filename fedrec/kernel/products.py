# SPDX-License-Identifier: Apache-2.0
"""Matrix products and activations in compiled code."""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from fedrec.kernel.compiled import FAST, INLINED, INNER
from fedrec.kernel.rows import matrix

# Pieces of matrix products in vector registers, as LLVM instructions.
#
# In loops over arrays the compiler decides which numbers stay in registers, and in a product this
# determines the speed. Here it is explicit: one tile of the result stays in registers during the
# loop over the inner dimension. LLVM maps vectors of any length to those of the processor.

FLOAT = ir.FloatType()
INTEGER = ir.IntType(64)
"""Type of addresses and counts."""

WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))
"""True if vectors have 16 numbers and there are 32 of them; otherwise 8 and 16."""
VECTOR = 16 if WIDE else 8
"""Numbers of a vector."""
ROWS = 8 if WIDE else 6
"""Rows of the largest tile, whose numbers and one row of the second factor fill the registers."""
BLOCK = 8
"""Rows and columns of the blocks that are transposed at once."""


def _pointer(builder: ir.IRBuilder, address: Any, *offsets: Any) -> Any:
    """A pointer to the number `offsets` numbers past an address."""
    address = builder.inttoptr(address, FLOAT.as_pointer())
    for offset in offsets:
        address = builder.gep(address, [offset])
    return address


def _load_vector(builder: ir.IRBuilder, address: Any, width: int) -> Any:
    """The numbers from a pointer on."""
    vector = ir.VectorType(FLOAT, width)
    return builder.load(builder.bitcast(address, vector.as_pointer()), align=4)


def _store_vector(builder: ir.IRBuilder, value: Any, address: Any) -> None:
    """Write a vector to where a pointer points."""
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=4)


def repeated(builder: ir.IRBuilder, value: Any, width: int) -> Any:
    """A vector of one number."""
    vector = ir.VectorType(FLOAT, width)
    single = builder.insert_element(
        ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), zeros)


def _multiply_add(builder: ir.IRBuilder, first: Any, second: Any, total: Any) -> Any:
    """total + one * other, in one instruction where the processor has it."""
    free: Any = {"flags": ("contract",)}
    return builder.fadd(total, builder.fmul(first, second, **free), **free)


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
    results = step(number, values)
    for value, new in zip(values, results, strict=True):
        value.add_incoming(new, body)
    following = builder.add(number, ir.Constant(INTEGER, stride))
    number.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, end), body, after)
    builder.position_at_end(after)
    return results


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
                row_of_b = _load_vector(
                    builder, _pointer(builder, b, builder.mul(number, b_row)), width
                )
                column = builder.mul(number, a_column)
                addresses = [_pointer(builder, a, column, builder.mul(a_row, row)) for row in each]
                return [
                    _multiply_add(
                        builder, repeated(builder, builder.load(address), width), row_of_b, total
                    )
                    for address, total in zip(addresses, sums, strict=True)
                ]

            sums = loop(builder, inner, 1, [zeros] * rows, step)
            factor = repeated(builder, alpha, width)
            for row, total in zip(each, sums, strict=True):
                address = _pointer(builder, out, builder.mul(out_row, row))
                before = _load_vector(builder, address, width)
                _store_vector(builder, _multiply_add(builder, factor, total, before), address)
            return context.get_dummy_value()

        return types.void(alpha, inner, a, a_row, a_column, b, b_row, out, out_row), generate

    # A compiled function is known by the names of its arguments' types, and code from one process's
    # cache and another's is linked by these: tiles of one name would be taken for each other.
    add_tile.__name__ = f"add_tile_{rows}_{width}"
    return intrinsic(add_tile)


@intrinsic
def vector_dot(typing, first, second, count):
    """The inner product of the numbers at two addresses, `count` of each, a multiple of `VECTOR`
    above 0. The order of its additions is fixed, so that results do not depend on the compiler."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, second, count = arguments

        def shuffled(values: Any, lanes: Sequence[int]) -> Any:
            mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
            return builder.shuffle_vector(values, ir.Constant(values.type, ir.Undefined), mask)

        def step(number: Any, sums: Sequence[Any]) -> list[Any]:
            left = _load_vector(builder, _pointer(builder, first, number), VECTOR)
            right = _load_vector(builder, _pointer(builder, second, number), VECTOR)
            return [_multiply_add(builder, left, right, sums[0])]

        zeros = ir.Constant(ir.VectorType(FLOAT, VECTOR), [0.0] * VECTOR)
        (total,) = loop(builder, count, VECTOR, [zeros], step)
        # a processor shuffles quickly among four numbers
        halves = [[4 * n + k for n in range(VECTOR // 4) for k in (i, i + 1)] for i in (0, 2)]
        length = VECTOR // 2
        while length:
            total = builder.fadd(*(shuffled(total, lanes) for lanes in halves))
            length //= 2
            halves = [range(length), range(length, 2 * length)]
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(first, second, count), generate


@intrinsic
def _transpose_block(typing, source, source_row, target, target_row):
    """Transpose a block of `BLOCK` rows and columns: addresses, and numbers from row to row."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, source_row, target, target_row = arguments
        rows_of_block = [ir.Constant(INTEGER, row) for row in range(BLOCK)]
        rows = [
            _load_vector(builder, _pointer(builder, source, builder.mul(source_row, number)), BLOCK)
            for number in rows_of_block
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
        for row, number in zip(rows, rows_of_block, strict=True):
            _store_vector(builder, row, _pointer(builder, target, builder.mul(target_row, number)))
        return context.get_dummy_value()

    return types.void(source, source_row, target, target_row), generate


# Matrix products in compiled code for the sizes of local training: tens to hundreds of rows and
# columns.
#
# BLAS libraries are optimised for larger matrices, and PyTorch's uses vectors of half the length on
# some processors.

_ZERO = np.float32(0)
_ONE = np.float32(1)
_WIDTH = 32 if WIDE else 16  # columns of the largest tile
_MIDDLE = _WIDTH // 2
_LOW_ROWS = 4  # rows of the second tile
_TWO_LOW = (8, 9)  # rows of which a tile of six leaves more single ones over than two of four
# Tiles with the same number of columns: for many rows, for four, and for single rows.
_TALL, _LOW, _FLAT = (tile(rows, _WIDTH) for rows in (ROWS, _LOW_ROWS, 1))
_TALL_MIDDLE, _LOW_MIDDLE, _FLAT_MIDDLE = (tile(rows, _MIDDLE) for rows in (ROWS, _LOW_ROWS, 1))
_TALL_8, _LOW_8, _FLAT_8 = (tile(rows, 8) for rows in (ROWS, _LOW_ROWS, 1))
_TALL_1, _LOW_1, _FLAT_1 = (tile(rows, 1) for rows in (ROWS, _LOW_ROWS, 1))


@njit(**FAST)
def add_product(alpha, a, a_transposed, b, b_transposed, beta, out, room):
    """out = alpha op(a) op(b) + beta out, all `float32`, row-major and contiguous; op transposes or
    does nothing.

    Args:
        room: `float32 [size of b]`, working memory if b is transposed.
    """
    rows, columns = out.shape
    inner = a.shape[0] if a_transposed else a.shape[1]
    _scale(out.reshape(-1), beta)
    if inner == 1:
        _add_outer(alpha, a.reshape(-1), b.reshape(-1), out)
    elif columns == 1 and a_transposed:
        _add_rows(alpha, b.reshape(-1), a, out.reshape(-1))
    elif columns == 1:
        _add_dots(alpha, a, b.reshape(-1), out.reshape(-1))
    elif (
        b_transposed
        and not a_transposed
        and beta == 0
        and whole(rows) * (inner + columns) < inner * columns
    ):
        _add_turned(np.float32(alpha), a, b, out, room)
    else:
        second = matrix(room, 0, inner, columns) if b_transposed else b
        if b_transposed:
            transpose(b, second)
        a_row, a_column = (1, rows) if a_transposed else (inner, 1)
        at = a.ctypes.data, second.ctypes.data, out.ctypes.data
        sizes = rows, columns, inner
        add_tiles(np.float32(alpha), sizes, at[0], a_row, a_column, at[1], columns, at[2], columns)


@njit(**FAST)
def add_views(alpha, a, b, out):
    """out += alpha a b, of parts of matrices whose rows may lie apart, and of a transposed a; of b
    and out the numbers of a row are side by side.

    Args:
        a: `float32 [r, n]`, n > 0.
        b: `float32 [n, c]`.
        out: `float32 [r, c]`.
    """
    sizes = out.shape[0], out.shape[1], a.shape[1]
    at = a.ctypes.data, b.ctypes.data, out.ctypes.data
    steps = a.strides[0] // 4, a.strides[1] // 4, b.strides[0] // 4, out.strides[0] // 4
    add_tiles(np.float32(alpha), sizes, at[0], steps[0], steps[1], at[1], steps[2], at[2], steps[3])


@njit(**FAST)
def add_outputs(inputs, weights, out, room):
    """out += inputs weights: the outputs of a layer."""
    add_product(_ONE, inputs, False, weights, False, _ONE, out, room)


@njit(**FAST)
def input_gradients(gradient, weights, out, room):
    """out = gradient weights^T: the gradient of a layer's inputs."""
    add_product(_ONE, gradient, False, weights, True, _ZERO, out, room)


@njit(**FAST)
def descend_weights(rate, inputs, gradient, weights, room):
    """weights -= rate inputs^T gradient: the step of a layer's weights."""
    add_product(-rate, inputs, True, gradient, False, _ONE, weights, room)


@njit(**FAST)
def whole(rows):
    """Number of rows, rounded up to whole blocks."""
    return -(-rows // BLOCK) * BLOCK


@njit(**INNER)
def _add_turned(alpha, a, b, out, room):
    """out = alpha a b^T via its transpose, b a^T: for large b less memory has to be transposed.

    a^T gets columns of zeros up to a whole block, because single columns take as long as eight.
    """
    inner = a.shape[1]
    columns = len(b)
    padded = whole(len(a))
    first = matrix(room, 0, inner, padded)
    turned = matrix(room, padded * inner, columns, padded)
    first[:, len(a) :] = 0
    transpose(a, first)
    turned[:] = 0
    sizes = columns, padded, inner
    at = b.ctypes.data, first.ctypes.data, turned.ctypes.data
    add_tiles(alpha, sizes, at[0], inner, 1, at[1], padded, at[2], padded)
    transpose(turned, out)


@njit(**FAST)
def transpose(values, transposed):
    """Write the transpose of a matrix into another, `[r, c]` into `[c, r]`; sizes that differ are
    cut. Rows may lie apart."""
    rows = min(len(values), transposed.shape[1])
    columns = min(values.shape[1], len(transposed))
    whole_rows = rows - rows % BLOCK
    whole_columns = columns - columns % BLOCK
    source = values.ctypes.data
    source_row = values.strides[0] // 4
    target = transposed.ctypes.data
    target_row = transposed.strides[0] // 4
    for r in range(0, whole_rows, BLOCK):
        for c in range(0, whole_columns, BLOCK):
            at = source + 4 * (r * source_row + c), target + 4 * (c * target_row + r)
            _transpose_block(at[0], source_row, at[1], target_row)  # pyright: ignore[reportCallIssue]
        for c in range(whole_columns, columns):
            for n in range(r, r + BLOCK):
                transposed[c, n] = values[n, c]
    for r in range(whole_rows, rows):
        for c in range(columns):
            transposed[c, r] = values[r, c]


@njit(**INNER)
def add_tiles(alpha, sizes, a, a_row, a_column, b, b_row, out, out_row):
    """Tile by tile: all rows of some columns, so that these columns of b stay in the L1 cache."""
    rows, columns, inner = sizes
    column = 0
    while column < columns:
        left = columns - column
        of_b = b + 4 * column
        of_out = out + 4 * column
        width = (
            _WIDTH if left >= _WIDTH else (_MIDDLE if left >= _MIDDLE else (8 if left >= 8 else 1))
        )
        at = (alpha, rows, inner, a, a_row, a_column, of_b, b_row, of_out, out_row)
        if width == _WIDTH:
            _add_columns(at, _TALL, _LOW, _FLAT)
        elif width == _MIDDLE:
            _add_columns(at, _TALL_MIDDLE, _LOW_MIDDLE, _FLAT_MIDDLE)
        elif width == 8:
            _add_columns(at, _TALL_8, _LOW_8, _FLAT_8)
        else:
            _add_columns(at, _TALL_1, _LOW_1, _FLAT_1)
        column += width


@njit(**INNER)
def _add_columns(at, tall, low, flat):
    """All rows of the columns of one tile."""
    alpha, rows, inner, a, a_row, a_column, b, b_row, out, out_row = at
    row = 0
    while row < rows:
        left = rows - row
        of_a = a + 4 * row * a_row
        of_out = out + 4 * row * out_row
        if left >= ROWS and (ROWS == 2 * _LOW_ROWS or left not in _TWO_LOW):
            height = ROWS
            tall(alpha, inner, of_a, a_row, a_column, b, b_row, of_out, out_row)
        elif left >= _LOW_ROWS:
            height = _LOW_ROWS
            low(alpha, inner, of_a, a_row, a_column, b, b_row, of_out, out_row)
        else:
            height = 1
            flat(alpha, inner, of_a, a_row, a_column, b, b_row, of_out, out_row)
        row += height


@njit(**INNER)
def _scale(values, factor):
    if factor == 0:  # out may be uninitialised
        values[:] = 0
    elif factor != 1:
        values *= factor


@njit(**INNER)
def _add_outer(alpha, column, row, out):
    for r in range(len(out)):
        factor = alpha * column[r]
        for c in range(row.size):
            out[r, c] += factor * row[c]


@njit(**INNER)
def _add_rows(alpha, factors, matrix, out):
    """out += alpha factors matrix: a weighted sum of the matrix's rows."""
    for r in range(len(matrix)):
        factor = alpha * factors[r]
        for c in range(out.size):
            out[c] += factor * matrix[r, c]


@njit(**INNER)
def _add_dots(alpha, matrix, vector, out):
    """out += alpha matrix vector: inner products with the matrix's rows."""
    for r in range(len(matrix)):
        total = np.float32(0)
        for c in range(vector.size):
            total += matrix[r, c] * vector[c]
        out[r] += alpha * total


# Activations in compiled code, written so that compilers vectorise their loops.
#
# The exponential is Cephes' `expf` (reduction to [-ln 2 / 2, ln 2 / 2], polynomial of degree 5),
# the hyperbolic tangent its `tanhf`: both are within 2 units in the last place, and NaN stays NaN.

IDENTITY, RELU, SIGMOID, TANH = range(4)
CODES = {"identity": IDENTITY, "relu": RELU, "sigmoid": SIGMOID, "tanh": TANH}

_F = np.float32
_LARGEST = _F(88.0)
_SMALLEST = _F(-87.0)
_LOG2_E = _F(1.44269504088896341)
_LN2_HIGH = _F(0.693359375)
_LN2_LOW = _F(-2.12194440e-4)


@njit(error_model="numpy")
def exponential(x):
    """e to the x, for x clipped to [-87, 88]."""
    bounded = min(max(x, _SMALLEST), _LARGEST)
    whole = np.floor(bounded * _LOG2_E + _F(0.5))
    rest = bounded - whole * _LN2_HIGH - whole * _LN2_LOW
    value = _F(1.9875691500e-4)
    value = value * rest + _F(1.3981999507e-3)
    value = value * rest + _F(8.3334519073e-3)
    value = value * rest + _F(4.1665795894e-2)
    value = value * rest + _F(1.6666665459e-1)
    value = value * rest + _F(5.0000001201e-1)
    value = value * rest * rest + rest + _F(1)
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return x if x != x else value * power


@njit(error_model="numpy")
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return _F(1) / (_F(1) + exponential(-x))


@njit(error_model="numpy")
def tanh(x):
    """The hyperbolic tangent."""
    size = abs(x)
    large = _F(1) - _F(2) / (exponential(_F(2) * size) + _F(1))
    square = x * x
    value = _F(-5.70498872745e-3)
    value = value * square + _F(2.06390887954e-2)
    value = value * square + _F(-5.37397155531e-2)
    value = value * square + _F(1.33314422036e-1)
    value = value * square + _F(-3.33332819422e-1)
    small = value * square * x + x
    return small if size < _F(0.625) else (large if x > 0 else -large)


@njit(error_model="numpy")
def activate(values, activation):
    """Apply an activation to an array, in place."""
    flat = values.reshape(-1)
    if activation == RELU:
        for i in range(flat.size):
            flat[i] *= _F(flat[i] > 0)  # a product is vectorised, a choice is not; NaN stays NaN
    elif activation == SIGMOID:
        for i in range(flat.size):
            flat[i] = sigmoid(flat[i])
    elif activation == TANH:
        for i in range(flat.size):
            flat[i] = tanh(flat[i])


@njit(error_model="numpy")
def through_activation(gradients, outputs, activation):
    """Turn gradients by an activation's outputs into gradients by its inputs, in place."""
    to = gradients.reshape(-1)
    out = outputs.reshape(-1)
    if activation == RELU:
        for i in range(to.size):
            to[i] = _F(0) if out[i] <= 0 else to[i]
    elif activation == SIGMOID:
        for i in range(to.size):
            to[i] *= out[i] * (_F(1) - out[i])
    elif activation == TANH:
        for i in range(to.size):
            to[i] *= _F(1) - out[i] * out[i]


@njit(**INLINED)
def mean_loss(outputs, labels, logistic):
    """Mean cross-entropy, or squared error, of outputs `[n, 1]`."""
    total = 0.0
    for n in range(len(outputs)):
        y = np.float64(outputs[n, 0])
        target = np.float64(labels[n])
        if logistic:
            total += max(y, 0.0) - y * target + np.log1p(np.exp(-abs(y))) if y == y else y
        else:
            total += (y - target) ** 2
    return total / len(outputs)
