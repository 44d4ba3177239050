# SPDX-License-Identifier: Apache-2.0
"""Matrix products in compiled code for the sizes of local training: tens to hundreds of rows and
columns.

BLAS libraries are optimised for larger matrices, and PyTorch's uses vectors of half the length on
some processors.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit, types

from fedrec.nn.native.memory import matrix
from fedrec.nn.native.tiles import BLOCK, ROWS, WIDE, tile, transpose_block
from fedrec.runtime.compilation import FAST, INNER, by_address

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
        _add_tiles(np.float32(alpha), sizes, at[0], a_row, a_column, at[1], columns, at[2], columns)


@functools.cache
def product_by_address() -> Any:
    """`add_product` for compiled code that takes it as an argument."""
    matrix_type = types.Array(types.float32, 2, "C")
    room = types.Array(types.float32, 1, "C")
    factors = matrix_type, types.boolean, matrix_type, types.boolean
    signature = types.void(types.float32, *factors, types.float32, matrix_type, room)
    return by_address(_product, signature)


def _product(alpha, a, a_transposed, b, b_transposed, beta, out, room):
    add_product(alpha, a, a_transposed, b, b_transposed, beta, out, room)


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
    _add_tiles(
        np.float32(alpha), sizes, at[0], steps[0], steps[1], at[1], steps[2], at[2], steps[3]
    )


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
    _add_tiles(alpha, sizes, at[0], inner, 1, at[1], padded, at[2], padded)
    transpose(turned, out)


@njit(**FAST)
def transpose(values, found):
    """Write the transpose of a matrix into another, `[r, c]` into `[c, r]`; sizes that differ are
    cut. Rows may lie apart."""
    rows = min(len(values), found.shape[1])
    columns = min(values.shape[1], len(found))
    whole_rows = rows - rows % BLOCK
    whole_columns = columns - columns % BLOCK
    source = values.ctypes.data
    source_row = values.strides[0] // 4
    target = found.ctypes.data
    target_row = found.strides[0] // 4
    for r in range(0, whole_rows, BLOCK):
        for c in range(0, whole_columns, BLOCK):
            at = source + 4 * (r * source_row + c), target + 4 * (c * target_row + r)
            transpose_block(at[0], source_row, at[1], target_row)  # pyright: ignore[reportCallIssue]
        for c in range(whole_columns, columns):
            for n in range(r, r + BLOCK):
                found[c, n] = values[n, c]
    for r in range(whole_rows, rows):
        for c in range(columns):
            found[c, r] = values[r, c]


@njit(**INNER)
def _add_tiles(alpha, sizes, a, a_row, a_column, b, b_row, out, out_row):
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
        target = out[r]
        factor = alpha * column[r]
        for c in range(target.size):
            target[c] += factor * row[c]


@njit(**INNER)
def _add_rows(alpha, factors, matrix, out):
    """out += alpha factors matrix: a weighted sum of the matrix's rows."""
    for r in range(len(matrix)):
        row = matrix[r]
        factor = alpha * factors[r]
        for c in range(out.size):
            out[c] += factor * row[c]


@njit(**INNER)
def _add_dots(alpha, matrix, vector, out):
    """out += alpha matrix vector: inner products with the matrix's rows."""
    for r in range(len(matrix)):
        row = matrix[r]
        total = np.float32(0)
        for c in range(vector.size):
            total += row[c] * vector[c]
        out[r] += alpha * total
