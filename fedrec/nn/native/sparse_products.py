# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a layer whose inputs are outputs of ReLU, with their zeros left out.

Half of zeros makes them 1.2 to 1.6 times as fast as those of `fedrec.nn.native.products` on a
processor with vectors of 16 numbers, seven tenths 1.6 to 2.5 times.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedrec.nn.native.memory import matrix
from fedrec.nn.native.products import transpose
from fedrec.nn.native.sparse_tiles import nonzero_row, positive_dots
from fedrec.nn.native.tiles import WIDE
from fedrec.runtime.compilation import FAST, INNER

_LONG = 64  # numbers of a row that are looked at together
_SHORT = 32  # the same of a batch, which is seldom longer
_NARROW = 64  # columns of the result that are in registers
_BROAD = 128 if WIDE else _NARROW
_LEAST_ZEROS = 0.4  # as a share; with fewer, other products are as fast
_OUTPUTS, _OUTPUTS_NARROW = (nonzero_row(_LONG, width) for width in (_BROAD, _NARROW))
_WEIGHTS, _WEIGHTS_NARROW = (nonzero_row(_SHORT, width) for width in (_BROAD, _NARROW))
_INPUTS, _INPUTS_NARROW = (positive_dots(_LONG, width) for width in (_BROAD, _NARROW))


@njit(**FAST)
def sparse_enough(inputs, columns, room):
    """Whether the functions below are for a layer: its inputs `[n, in]` have many zeros, the sizes
    are whole vectors, and the working memory holds the transposed inputs."""
    rows, width = inputs.shape
    if width % _LONG or columns % _NARROW or width * _padded(rows) > room.size:
        return False
    flat = inputs.reshape(-1)
    zeros = np.int32(0)
    for i in range(flat.size):
        zeros += np.int32(flat[i] == 0)
    return zeros >= _LEAST_ZEROS * flat.size


@njit(**FAST)
def add_sparse_outputs(inputs, weights, out):
    """out += inputs weights, see `products.add_outputs`."""
    _add_nonzeros(np.float32(1), inputs, weights, out, _LONG, _OUTPUTS, _OUTPUTS_NARROW)


@njit(**FAST)
def sparse_input_gradients(gradient, weights, inputs, out):
    """out = gradient weights^T where the inputs are positive, and 0 elsewhere: the gradient of what
    ReLU was applied to, see `products.input_gradients`."""
    rows, columns = gradient.shape
    width = inputs.shape[1]
    out[:] = 0
    for first in range(0, width, _LONG):
        column = 0
        while column < columns:
            broad = columns - column >= _BROAD
            of_weights = weights.ctypes.data + 4 * (first * columns + column)
            for row in range(rows):
                a = gradient.ctypes.data + 4 * (row * columns + column)
                deciding = inputs.ctypes.data + 4 * (row * width + first)
                to = out.ctypes.data + 4 * (row * width + first)
                if broad:
                    _INPUTS(deciding, a, of_weights, columns, to)
                else:
                    _INPUTS_NARROW(deciding, a, of_weights, columns, to)
            column += _BROAD if broad else _NARROW


@njit(**FAST)
def descend_sparse_weights(rate, inputs, gradient, weights, room):
    """weights -= rate inputs^T gradient, see `products.descend_weights`."""
    rows, width = inputs.shape
    turned = matrix(room, 0, width, _padded(rows))
    for number in range(width):
        for row in range(rows, turned.shape[1]):
            turned[number, row] = 0
    transpose(inputs, turned)
    _add_nonzeros(-rate, turned, gradient, weights, _SHORT, _WEIGHTS, _WEIGHTS_NARROW)


@njit(**INNER)
def _add_nonzeros(alpha, a, b, out, bits, broad, narrow):
    """out += alpha a b without zeros of a `[rows, inner]`, `bits` numbers of a row at a time; b may
    end where only zeros of a would meet it."""
    rows, inner = a.shape
    columns = out.shape[1]
    column = 0
    while column < columns:
        width = _BROAD if columns - column >= _BROAD else _NARROW
        for first in range(0, inner, bits):
            of_b = b.ctypes.data + 4 * (first * columns + column)
            for row in range(rows):
                of_a = a.ctypes.data + 4 * (row * inner + first)
                to = out.ctypes.data + 4 * (row * columns + column)
                if width == _BROAD:
                    broad(alpha, of_a, of_b, columns, to)
                else:
                    narrow(alpha, of_a, of_b, columns, to)
        column += width


@njit(**INNER)
def _padded(rows):
    """Number of rows, rounded up to whole words."""
    return -(-rows // _SHORT) * _SHORT
