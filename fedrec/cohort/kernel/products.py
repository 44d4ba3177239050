# SPDX-License-Identifier: Apache-2.0
"""Matrix products in compiled code, of the sizes that local training has: tens to hundreds of rows and columns.

A BLAS is made for larger ones, and the one that PyTorch brings uses vectors of half the length on some processors.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedrec.cohort.kernel.memory import FAST, matrix
from fedrec.cohort.kernel.tiles import BLOCK, ROWS, WIDE, tile, transpose_block

_WIDTH = 32 if WIDE else 16  # columns of the largest tile
_TALL, _TALL_8, _TALL_1 = (tile(ROWS, width) for width in (_WIDTH, 8, 1))
_FLAT, _FLAT_8, _FLAT_1 = (tile(1, width) for width in (_WIDTH, 8, 1))


@njit(**FAST)
def add_product(alpha, a, a_transposed, b, b_transposed, beta, out, room):
    """out = alpha op(a) op(b) + beta out, all `float32`, row-major and contiguous; op transposes or does nothing.

    Args:
        room: `float32 [numbers of b]`, written where b is transposed.
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
    elif b_transposed and not a_transposed and beta == 0 and rows * (inner + columns) < inner * columns:
        _add_turned(np.float32(alpha), a, b, out, room)
    else:
        second = matrix(room, 0, inner, columns) if b_transposed else b
        if b_transposed:
            transpose(b, second)
        a_row, a_column = (1, rows) if a_transposed else (inner, 1)
        at = a.ctypes.data, second.ctypes.data, out.ctypes.data
        _add_tiles(np.float32(alpha), rows, columns, inner, at[0], a_row, a_column, at[1], at[2])


@njit(**FAST)
def _add_turned(alpha, a, b, out, room):
    """out = alpha a b^T by way of its transpose, b a^T: for large b less has to be transposed."""
    (rows, inner), columns = a.shape, len(b)
    first, turned = matrix(room, 0, inner, rows), matrix(room, rows * inner, columns, rows)
    transpose(a, first)
    turned[:] = 0
    _add_tiles(alpha, columns, rows, inner, b.ctypes.data, inner, 1, first.ctypes.data, turned.ctypes.data)
    transpose(turned, out)


@njit(**FAST)
def transpose(values, found):
    """Write a matrix transposed into another, `[r, c]` into `[c, r]`."""
    rows, columns = values.shape
    whole_rows, whole_columns = rows - rows % BLOCK, columns - columns % BLOCK
    source, target = values.ctypes.data, found.ctypes.data
    for r in range(0, whole_rows, BLOCK):
        for c in range(0, whole_columns, BLOCK):
            at = source + 4 * (r * columns + c), target + 4 * (c * rows + r)
            transpose_block(at[0], columns, at[1], rows)  # pyright: ignore[reportCallIssue]
        for c in range(whole_columns, columns):
            for n in range(r, r + BLOCK):
                found[c, n] = values[n, c]
    for r in range(whole_rows, rows):
        for c in range(columns):
            found[c, r] = values[r, c]


@njit(**FAST)
def _add_tiles(alpha, rows, columns, inner, a, a_row, a_column, b, out):
    """Tile after tile: all rows of some columns, so that these columns of b stay in the nearest cache."""
    column = 0
    while column < columns:
        width = _WIDTH if columns - column >= _WIDTH else (8 if columns - column >= 8 else 1)
        of_b, row = b + 4 * column, 0
        while row < rows:
            tall = rows - row >= ROWS
            of_a, of_out = a + 4 * row * a_row, out + 4 * (row * columns + column)
            if tall and width == _WIDTH:
                _TALL(alpha, inner, of_a, a_row, a_column, of_b, columns, of_out, columns)
            elif tall and width == 8:
                _TALL_8(alpha, inner, of_a, a_row, a_column, of_b, columns, of_out, columns)
            elif tall:
                _TALL_1(alpha, inner, of_a, a_row, a_column, of_b, columns, of_out, columns)
            elif width == _WIDTH:
                _FLAT(alpha, inner, of_a, a_row, a_column, of_b, columns, of_out, columns)
            elif width == 8:
                _FLAT_8(alpha, inner, of_a, a_row, a_column, of_b, columns, of_out, columns)
            else:
                _FLAT_1(alpha, inner, of_a, a_row, a_column, of_b, columns, of_out, columns)
            row += ROWS if tall else 1
        column += width


@njit(**FAST)
def _scale(values, factor):
    if factor == 0:  # what was there may be anything
        values[:] = 0
    elif factor != 1:
        values *= factor


@njit(**FAST)
def _add_outer(alpha, column, row, out):
    for r in range(len(out)):
        target, factor = out[r], alpha * column[r]
        for c in range(target.size):
            target[c] += factor * row[c]


@njit(**FAST)
def _add_rows(alpha, factors, matrix, out):
    """out += alpha factors matrix, for a matrix whose rows are added up."""
    for r in range(len(matrix)):
        row, factor = matrix[r], alpha * factors[r]
        for c in range(out.size):
            out[c] += factor * row[c]


@njit(**FAST)
def _add_dots(alpha, matrix, vector, out):
    """out += alpha matrix vector, for a matrix whose rows are multiplied."""
    for r in range(len(matrix)):
        row, total = matrix[r], np.float32(0)
        for c in range(vector.size):
            total += row[c] * vector[c]
        out[r] += alpha * total
