# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a layer whose inputs are outputs of ReLU, with their zeros left out.

Half of zeros makes them 1.5 to 1.6 times as fast as those of `fedrec.nn.native.products` on a
processor with vectors of 16 numbers, seven tenths 2.3 times.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedrec.nn.native.memory import matrix
from fedrec.nn.native.products import transpose
from fedrec.nn.native.rows import copy_row
from fedrec.nn.native.sparse_tiles import descend_row, nonzero_row
from fedrec.nn.native.tiles import WIDE
from fedrec.runtime.compilation import FAST, INNER

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
