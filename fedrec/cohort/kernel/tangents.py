# SPDX-License-Identifier: Apache-2.0
"""Numbers with their tangents in compiled code: the parameters of a client, what passes through the
layers of its network, and products of both, for derivatives along a direction
(`fedrec.cohort.kernel.second_order`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from fedrec.nn.native.memory import aligned, matrix
from fedrec.runtime.compilation import INNER

TOGETHER = 128
"""Examples that pass through the layers together: their outputs fit into an L2 cache."""
_ZERO = np.float32(0)
_ONE = np.float32(1)


class Values(NamedTuple):
    """The parameters of one client, or something of their shape, such as a gradient.

    Attributes:
        dense: `float32 [P]`.
        rows: `float32 [R, d]`, of the items that the client touches; `[R, 0]` without an item
            table.
        biases: `float32 [R, 1]`, of these items; `[R, 0]` without.
    """

    dense: np.ndarray
    rows: np.ndarray
    biases: np.ndarray


class Derivative(NamedTuple):
    """A derivative of one client's mean loss on a batch.

    Attributes:
        at: the parameters.
        along: the direction of a product with the Hessian.
        total: the derivative is added to it.
        second: whether it is the product with the Hessian, otherwise the gradient.
        codes: `int64 [W]`, the codes of the user's features side by side.
        first_row: see `Client.first_row`.
        examples: number of examples in the batch.
    """

    at: Values
    along: Values
    total: Values
    second: bool
    codes: np.ndarray
    first_row: int
    examples: int


class PassMemory(NamedTuple):
    """Working memory of forward and backward passes; first the numbers, then their tangents.

    Attributes:
        means: `[2, sum of widths]`, means of the rows of the users' tables.
        to_means: `[2, largest of these widths]`, gradients of one of them.
        base: `[2, out]`, the part of bias and user in the outputs of the first layer.
        to_base: `[2, out]`, its gradients.
        gathered: `[2, B * d]`, rows of the item table.
        to_rows: `[2, B * d]`, their gradients.
        projected: `[2, all categories * out]`, products of the categories' rows and the weights.
        to_projected: `[2, all categories * out]`, their gradients.
        to_categories: `[2, size of the largest table]`, gradients of the categories' rows.
        hidden: `[2, B * sum of outputs]`, outputs of the layers, one after the other.
        gradients: `[4, B * most outputs]`, of one layer's outputs and of the next one's.
        room: `[size of the largest factor]`, for transposed factors of products.
        add_product: see `fedrec.nn.native.products`.
    """

    means: np.ndarray
    to_means: np.ndarray
    base: np.ndarray
    to_base: np.ndarray
    gathered: np.ndarray
    to_rows: np.ndarray
    projected: np.ndarray
    to_projected: np.ndarray
    to_categories: np.ndarray
    hidden: np.ndarray
    gradients: np.ndarray
    room: np.ndarray
    add_product: Any


@njit(**INNER)
def memory_for(network, width, add_product):
    """Working memory for item rows of a width."""
    users = 0
    widest_user = 0
    for user in network.users:
        users = max(users, user[2] + user[1])
        widest_user = max(widest_user, user[1])
    categories = 0
    table = 0
    for feature in network.features:
        categories += feature[5]
        table = max(table, feature[5] * feature[1])
    out = network.layers[0, 2]
    outputs = 0
    widest = 0
    room = 0
    for layer in network.layers:
        outputs += layer[2]
        widest = max(widest, layer[2])
        room = max(room, layer[1] * layer[2])
    return PassMemory(
        aligned(2, users),
        aligned(2, widest_user),
        aligned(2, out),
        aligned(2, out),
        aligned(2, TOGETHER * width),
        aligned(2, TOGETHER * width),
        aligned(2, categories * out),
        aligned(2, categories * out),
        aligned(2, table),
        aligned(2, TOGETHER * outputs),
        aligned(4, TOGETHER * widest),
        aligned(1, room)[0],
        add_product,
    )


@njit(**INNER)
def values_like(dense, rows, biases):
    """Values of the shapes of these, not initialised."""
    return Values(
        aligned(1, dense.size)[0],
        np.empty(rows.shape, np.float32),
        np.empty(biases.shape, np.float32),
    )


@njit(**INNER)
def copy_values(source, target):
    """Write values to others of their shapes."""
    for place in range(source.dense.size):
        target.dense[place] = source.dense[place]
    for row in range(len(source.rows)):
        for i in range(source.rows.shape[1]):
            target.rows[row, i] = source.rows[row, i]
        for i in range(source.biases.shape[1]):
            target.biases[row, i] = source.biases[row, i]


@njit(**INNER)
def clear_values(values):
    """Set all to zero."""
    values.dense[:] = 0
    values.rows[:] = 0
    values.biases[:] = 0


@njit(**INNER)
def subtract(values, rates, gradient):
    """values -= rates gradient."""
    dense_rates, item_rate, bias_rate = rates
    for place in range(values.dense.size):
        values.dense[place] -= dense_rates[place] * gradient.dense[place]
    for row in range(len(values.rows)):
        for i in range(values.rows.shape[1]):
            values.rows[row, i] -= item_rate * gradient.rows[row, i]
        for i in range(values.biases.shape[1]):
            values.biases[row, i] -= bias_rate * gradient.biases[row, i]


@njit(**INNER)
def both(arrays, place, rows, columns):
    """Matrices of numbers and of their tangents, in memory `[2, ...]`."""
    return matrix(arrays[0], place, rows, columns), matrix(arrays[1], place, rows, columns)


@njit(**INNER)
def matrices_of(of, place, rows, columns):
    """A matrix of the parameters, and of the direction, which are its tangents."""
    return (
        matrix(of.at.dense, place, rows, columns),
        matrix(of.along.dense, place, rows, columns),
    )


@njit(**INNER)
def add_linear(inputs, weights, outputs, second, memory):
    """outputs += inputs weights, each with its tangents."""
    room = memory.room
    memory.add_product(_ONE, inputs[0], False, weights[0], False, _ONE, outputs[0], room)
    if second:
        memory.add_product(_ONE, inputs[1], False, weights[0], False, _ONE, outputs[1], room)
        memory.add_product(_ONE, inputs[0], False, weights[1], False, _ONE, outputs[1], room)


@njit(**INNER)
def through_linear(inputs, weights, gradients, to_weights, to_inputs, second, memory):
    """The gradients of a product's inputs, written, with their tangents; the derivative by the
    weights is added to a total."""
    room = memory.room
    memory.add_product(_ONE, gradients[0], False, weights[0], True, _ZERO, to_inputs[0], room)
    if second:
        memory.add_product(_ONE, gradients[1], False, weights[0], True, _ZERO, to_inputs[1], room)
        memory.add_product(_ONE, gradients[0], False, weights[1], True, _ONE, to_inputs[1], room)
        memory.add_product(_ONE, inputs[1], True, gradients[0], False, _ONE, to_weights, room)
        memory.add_product(_ONE, inputs[0], True, gradients[1], False, _ONE, to_weights, room)
    else:
        memory.add_product(_ONE, inputs[0], True, gradients[0], False, _ONE, to_weights, room)
