# SPDX-License-Identifier: Apache-2.0
"""The gradient of a query's loss through gradient steps on a support, in compiled code (Finn,
Abbeel and Levine 2017).

Backwards through a step theta' = theta - a grad L(theta), the gradient v by theta' becomes v -
H (a v) by theta, where H is the Hessian of L at theta. The product with H is computed without H
(Pearlmutter 1994): beside each number, forward and backward pass compute its tangent, the
derivative along the direction a v; the tangent of the gradient is the product. Tangents take two
products of matrices where the numbers take one.

Examples pass through all layers some at a time, so that the layers' outputs stay in the caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from fedrec.cohort.kernel.memory import Batch
from fedrec.cohort.kernel.steps import mean_loss
from fedrec.nn.native.activations import (
    SIGMOID,
    TANH,
    activate,
    sigmoid,
    through_activation,
)
from fedrec.nn.native.memory import aligned, matrix
from fedrec.runtime.compilation import FAST, INNER, compiled

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TWO = np.float32(2)
_TOGETHER = 128  # examples, whose outputs of all layers fit into an L2 cache


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


@compiled
def move_by_meta_gradients(
    network, rates, second, examples, steps, first_rows, dense, tables, codes, add_product, losses
):
    """Move C clients by minus the gradients of their queries' losses.

    Args:
        network: the model, without a product of embeddings.
        rates: step sizes of the steps on the support: `float32 [P]` of the dense parameters, and
            those of the items' rows and biases.
        second: whether the gradient is by the parameters before these steps, otherwise by those
            after them.
        examples: items, places and labels, `[S, C, B]` each, and the number of examples
            `int64 [S, C]`: of each client the support in every step but its last, then the query.
        steps: `int64 [C]`, number of steps with the query; a client with 0 stays as it is.
        first_rows: `int64 [C]`, see `Client.first_row`.
        dense: `float32 [C, P]`, changed in place.
        tables: the items' rows `float32 [C, R, d]` and biases `[C, R, 1]` or `[C, R, 0]`, likewise.
        codes: `int64 [C, W]`, of the users' features.
        add_product: see `fedrec.nn.native.products`.
        losses: `float64 [C]`, written: mean loss of the query.
    """
    items, places, labels, counts = examples
    rows, biases = tables
    most = len(items)
    memory = _memory_for(network, rows.shape[2], add_product)
    dense_path = aligned(most, dense.shape[1])
    rows_path = np.empty((most, *rows.shape[1:]), np.float32)
    biases_path = np.empty((most, *biases.shape[1:]), np.float32)
    total = _like(dense[0], rows[0], biases[0])
    along = _like(dense[0], rows[0], biases[0])
    ones = np.ones(dense.shape[1], np.float32)
    for client in range(len(steps)):
        own = Values(dense[client], rows[client], biases[client])
        code = codes[client]
        first = first_rows[client]
        last = steps[client] - 1
        if last < 0:
            continue
        _copy(own, Values(dense_path[0], rows_path[0], biases_path[0]))
        for step in range(last + 1):
            at = Values(dense_path[step], rows_path[step], biases_path[step])
            n = counts[step, client]
            batch = Batch(
                items[step, client, :n], places[step, client, :n], labels[step, client, :n]
            )
            _clear(total)
            losses[client] = _add_derivative(
                network, Derivative(at, at, total, False, code, first, n), batch, memory
            )
            if step < last:
                after = Values(dense_path[step + 1], rows_path[step + 1], biases_path[step + 1])
                _copy(at, after)
                _subtract(after, rates, total)
        if second:
            for step in range(last - 1, -1, -1):
                at = Values(dense_path[step], rows_path[step], biases_path[step])
                n = counts[step, client]
                batch = Batch(
                    items[step, client, :n], places[step, client, :n], labels[step, client, :n]
                )
                _clear(along)
                _subtract(along, rates, total)
                _add_derivative(
                    network, Derivative(at, along, total, True, code, first, n), batch, memory
                )
        _subtract(own, (ones, _ONE, _ONE), total)


@njit(**FAST)
def _memory_for(network, width, add_product):
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
        aligned(2, _TOGETHER * width),
        aligned(2, _TOGETHER * width),
        aligned(2, categories * out),
        aligned(2, categories * out),
        aligned(2, table),
        aligned(2, _TOGETHER * outputs),
        aligned(4, _TOGETHER * widest),
        aligned(1, room)[0],
        add_product,
    )


@njit(**FAST)
def _like(dense, rows, biases):
    return Values(
        aligned(1, dense.size)[0],
        np.empty(rows.shape, np.float32),
        np.empty(biases.shape, np.float32),
    )


@njit(**INNER)
def _copy(source, target):
    for place in range(source.dense.size):
        target.dense[place] = source.dense[place]
    for row in range(len(source.rows)):
        for i in range(source.rows.shape[1]):
            target.rows[row, i] = source.rows[row, i]
        for i in range(source.biases.shape[1]):
            target.biases[row, i] = source.biases[row, i]


@njit(**INNER)
def _clear(values):
    values.dense[:] = 0
    values.rows[:] = 0
    values.biases[:] = 0


@njit(**INNER)
def _subtract(values, rates, gradient):
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
def _add_derivative(network, of, batch, memory):
    """Add a derivative to its total; returns the mean loss, 0 with the second derivative."""
    _begin(network, of, memory)
    total = 0.0
    for start in range(0, len(batch.items), _TOGETHER):
        end = min(start + _TOGETHER, len(batch.items))
        part = Batch(batch.items[start:end], batch.places[start:end], batch.labels[start:end])
        outputs, tangents = _forward(network, of, part, memory)
        if not of.second:
            total += mean_loss(outputs, part.labels, network.logistic) * (end - start)
        _differentiate(network, of, part, outputs, tangents)
        _backward(network, of, part, memory, outputs, tangents)
    _end(network, of, memory)
    return total / len(batch.items)


@njit(**INNER)
def _add_linear(inputs, input_tangents, weights, directions, out, tangents, second, memory):
    """out += inputs weights, and its tangents."""
    memory.add_product(_ONE, inputs, False, weights, False, _ONE, out, memory.room)
    if second:
        memory.add_product(_ONE, input_tangents, False, weights, False, _ONE, tangents, memory.room)
        memory.add_product(_ONE, inputs, False, directions, False, _ONE, tangents, memory.room)


@njit(**INNER)
def _through_linear(
    inputs,
    input_tangents,
    weights,
    directions,
    gradient,
    tangents,
    to_weights,
    to_inputs,
    inputs_tangents,
    second,
    memory,
):
    """The gradient of a product's inputs and its tangents, written; the derivative by the weights
    is added to the total."""
    memory.add_product(_ONE, gradient, False, weights, True, _ZERO, to_inputs, memory.room)
    if second:
        memory.add_product(
            _ONE, tangents, False, weights, True, _ZERO, inputs_tangents, memory.room
        )
        memory.add_product(
            _ONE, gradient, False, directions, True, _ONE, inputs_tangents, memory.room
        )
        memory.add_product(
            _ONE, input_tangents, True, gradient, False, _ONE, to_weights, memory.room
        )
        memory.add_product(_ONE, inputs, True, tangents, False, _ONE, to_weights, memory.room)
    else:
        memory.add_product(_ONE, inputs, True, gradient, False, _ONE, to_weights, memory.room)


@njit(**INNER)
def _first_weights(network, values, start, rows):
    """Some rows of the first layer's weights."""
    out = network.layers[0, 2]
    return matrix(values.dense, network.layers[0, 0] + start * out, rows, out)


@njit(**INNER)
def _mean_rows(user, codes, dense, means):
    """The mean of the rows of a table that a user's codes name."""
    width = user[1]
    mean = means[user[2] : user[2] + width]
    mean[:] = 0
    count = np.float32(_known(user, codes))
    for code in codes[user[3] : user[4]]:
        if code >= 0:
            for i in range(width):
                mean[i] += dense[user[0] + code * width + i] / count


@njit(**INNER)
def _known(user, codes):
    """Number of codes of one of the user's features, at least 1."""
    count = 0
    for code in codes[user[3] : user[4]]:
        count += code >= 0
    return max(1, count)


@njit(**INNER)
def _begin(network, of, memory):
    """What all examples have in common: the part of bias and user in the outputs of the first
    layer, and the products of the categories' rows."""
    out = network.layers[0, 2]
    bias = network.layers[0, 3]
    base = memory.base
    base[:] = 0
    memory.to_base[:] = 0
    memory.projected[:] = 0
    memory.to_projected[:] = 0
    if bias >= 0:
        _repeat(of.at.dense[bias : bias + out], base[:1])
        _repeat(of.along.dense[bias : bias + out], base[1:])
    for user in network.users:
        _mean_rows(user, of.codes, of.at.dense, memory.means[0])
        _mean_rows(user, of.codes, of.along.dense, memory.means[1])
        _add_linear(
            matrix(memory.means[0], user[2], 1, user[1]),
            matrix(memory.means[1], user[2], 1, user[1]),
            _first_weights(network, of.at, user[2], user[1]),
            _first_weights(network, of.along, user[2], user[1]),
            base[:1],
            base[1:],
            of.second,
            memory,
        )
    first = 0
    for feature in network.features:
        _add_linear(
            matrix(of.at.dense, feature[0], feature[5], feature[1]),
            matrix(of.along.dense, feature[0], feature[5], feature[1]),
            _first_weights(network, of.at, feature[2], feature[1]),
            _first_weights(network, of.along, feature[2], feature[1]),
            matrix(memory.projected[0], first * out, feature[5], out),
            matrix(memory.projected[1], first * out, feature[5], out),
            of.second,
            memory,
        )
        first += feature[5]


@njit(**INNER)
def _end(network, of, memory):
    """The derivatives of what all examples have in common."""
    out = network.layers[0, 2]
    bias = network.layers[0, 3]
    dense = of.total.dense
    which = 1 if of.second else 0
    if bias >= 0:
        for o in range(out):
            dense[bias + o] += memory.to_base[which, o]
    for user in network.users:
        width = user[1]
        _through_linear(
            matrix(memory.means[0], user[2], 1, width),
            matrix(memory.means[1], user[2], 1, width),
            _first_weights(network, of.at, user[2], width),
            _first_weights(network, of.along, user[2], width),
            memory.to_base[:1],
            memory.to_base[1:],
            _first_weights(network, of.total, user[2], width),
            matrix(memory.to_means[0], 0, 1, width),
            matrix(memory.to_means[1], 0, 1, width),
            of.second,
            memory,
        )
        count = np.float32(_known(user, of.codes))
        for code in of.codes[user[3] : user[4]]:
            if code >= 0:
                for i in range(width):
                    dense[user[0] + code * width + i] += memory.to_means[which, i] / count
    first = 0
    for feature in network.features:
        categories = feature[5]
        width = feature[1]
        _through_linear(
            matrix(of.at.dense, feature[0], categories, width),
            matrix(of.along.dense, feature[0], categories, width),
            _first_weights(network, of.at, feature[2], width),
            _first_weights(network, of.along, feature[2], width),
            matrix(memory.to_projected[0], first * out, categories, out),
            matrix(memory.to_projected[1], first * out, categories, out),
            _first_weights(network, of.total, feature[2], width),
            matrix(memory.to_categories[0], 0, categories, width),
            matrix(memory.to_categories[1], 0, categories, width),
            of.second,
            memory,
        )
        for place in range(categories * width):
            dense[feature[0] + place] += memory.to_categories[which, place]
        first += categories


@njit(**INNER)
def _forward(network, of, part, memory):
    """Predictions `[n, 1]` and their tangents."""
    n = len(part.items)
    hidden = matrix(memory.hidden[0], 0, n, network.layers[0, 2])
    tangents = matrix(memory.hidden[1], 0, n, network.layers[0, 2])
    _repeat(memory.base[0], hidden)
    _repeat(memory.base[1], tangents)
    width = of.at.rows.shape[1]
    if width:
        gathered = matrix(memory.gathered[0], 0, n, width)
        gathered_tangents = matrix(memory.gathered[1], 0, n, width)
        for example in range(n):
            row = part.places[example] - of.first_row
            for i in range(width):
                gathered[example, i] = of.at.rows[row, i]
                gathered_tangents[example, i] = of.along.rows[row, i]
        _add_linear(
            gathered,
            gathered_tangents,
            _first_weights(network, of.at, network.item_start, width),
            _first_weights(network, of.along, network.item_start, width),
            hidden,
            tangents,
            of.second,
            memory,
        )
    _add_categories(network, part, memory.projected[0], hidden)
    if of.second:
        _add_categories(network, part, memory.projected[1], tangents)
    place = 0
    for layer in range(1, len(network.layers)):
        weight, inputs, out, bias = _layer(network, layer)
        activate(hidden, network.activation)
        if of.second:
            through_activation(tangents, hidden, network.activation)
        place += _TOGETHER * inputs
        following = matrix(memory.hidden[0], place, n, out)
        following_tangents = matrix(memory.hidden[1], place, n, out)
        following[:] = 0
        following_tangents[:] = 0
        if bias >= 0:
            _repeat(of.at.dense[bias : bias + out], following)
            _repeat(of.along.dense[bias : bias + out], following_tangents)
        _add_linear(
            hidden,
            tangents,
            matrix(of.at.dense, weight, inputs, out),
            matrix(of.along.dense, weight, inputs, out),
            following,
            following_tangents,
            of.second,
            memory,
        )
        hidden = following
        tangents = following_tangents
    for offset in network.offsets:
        for example in range(n):
            hidden[example, 0] += of.at.dense[offset]
            tangents[example, 0] += of.along.dense[offset]
    if of.at.biases.shape[1]:
        for example in range(n):
            row = part.places[example] - of.first_row
            hidden[example, 0] += of.at.biases[row, 0]
            tangents[example, 0] += of.along.biases[row, 0]
    return hidden, tangents


@njit(**INNER)
def _layer(network, place):
    """Offset of a layer's weight, number of inputs and outputs, and offset of its bias."""
    own = network.layers[place]
    return own[0], own[1], own[2], own[3]


@njit(**INNER)
def _repeat(row, out):
    for example in range(len(out)):
        for o in range(row.size):
            out[example, o] = row[o]


@njit(**INNER)
def _add_categories(network, part, projected, out):
    """Add to each example the mean of the products of its item's categories."""
    width = out.shape[1]
    for example in range(len(out)):
        item = part.items[example]
        target = out[example]
        first = 0
        for feature in network.features:
            share = network.item_shares[item, feature[6]]
            for column in range(feature[3], feature[4]):
                code = network.item_codes[item, column]
                if code < 0:
                    break
                source = projected[(first + code) * width : (first + code + 1) * width]
                for o in range(width):
                    target[o] += share * source[o]
            first += feature[5]


@njit(**INNER)
def _sum_by_category(network, part, gradient, to_projected):
    """Add the gradient of each example to those of its item's categories."""
    width = gradient.shape[1]
    for example in range(len(gradient)):
        item = part.items[example]
        source = gradient[example]
        first = 0
        for feature in network.features:
            share = network.item_shares[item, feature[6]]
            for column in range(feature[3], feature[4]):
                code = network.item_codes[item, column]
                if code < 0:
                    break
                target = to_projected[(first + code) * width : (first + code + 1) * width]
                for o in range(width):
                    target[o] += share * source[o]
            first += feature[5]


@njit(**INNER)
def _differentiate(network, of, part, outputs, tangents):
    """Turn predictions and their tangents into the gradient by them and its tangents, in place."""
    examples = np.float32(of.examples)
    for n in range(len(outputs)):
        target = part.labels[n]
        if network.logistic:
            chance = sigmoid(outputs[n, 0])
            outputs[n, 0] = (chance - target) / examples
            tangents[n, 0] *= chance * (_ONE - chance) / examples
        else:
            outputs[n, 0] = _TWO * (outputs[n, 0] - target) / examples
            tangents[n, 0] *= _TWO / examples


@njit(**INNER)
def _backward(network, of, part, memory, gradient, tangents):
    """Add the derivatives of what differs between examples, and gather those of what they have in
    common."""
    n = len(gradient)
    found = tangents if of.second else gradient
    _sum_outputs(network, of, part, found)
    place = 0
    half = 0
    for layer in range(len(network.layers) - 1):
        place += _TOGETHER * network.layers[layer, 2]
    for layer in range(len(network.layers) - 1, 0, -1):
        weight, inputs, out, bias = _layer(network, layer)
        place -= _TOGETHER * inputs
        hidden = matrix(memory.hidden[0], place, n, inputs)
        hidden_tangents = matrix(memory.hidden[1], place, n, inputs)
        before = matrix(memory.gradients[half], 0, n, inputs)
        before_tangents = matrix(memory.gradients[half + 1], 0, n, inputs)
        if bias >= 0:
            _sum_rows(tangents if of.second else gradient, of.total.dense[bias : bias + out])
        _through_linear(
            hidden,
            hidden_tangents,
            matrix(of.at.dense, weight, inputs, out),
            matrix(of.along.dense, weight, inputs, out),
            gradient,
            tangents,
            matrix(of.total.dense, weight, inputs, out),
            before,
            before_tangents,
            of.second,
            memory,
        )
        if of.second:
            _bend(before, before_tangents, hidden, hidden_tangents, network.activation)
        through_activation(before, hidden, network.activation)
        gradient = before
        tangents = before_tangents
        half = 2 - half
    _sum_rows(gradient, memory.to_base[0])
    _sum_by_category(network, part, gradient, memory.to_projected[0])
    if of.second:
        _sum_rows(tangents, memory.to_base[1])
        _sum_by_category(network, part, tangents, memory.to_projected[1])
    if of.at.rows.shape[1]:
        _through_rows(network, of, part, memory, gradient, tangents)


@njit(**INNER)
def _through_rows(network, of, part, memory, gradient, tangents):
    """Add the derivatives by the items' rows and by the weights that multiply them."""
    n = len(gradient)
    width = of.at.rows.shape[1]
    _through_linear(
        matrix(memory.gathered[0], 0, n, width),
        matrix(memory.gathered[1], 0, n, width),
        _first_weights(network, of.at, network.item_start, width),
        _first_weights(network, of.along, network.item_start, width),
        gradient,
        tangents,
        _first_weights(network, of.total, network.item_start, width),
        matrix(memory.to_rows[0], 0, n, width),
        matrix(memory.to_rows[1], 0, n, width),
        of.second,
        memory,
    )
    found = matrix(memory.to_rows[1] if of.second else memory.to_rows[0], 0, n, width)
    for example in range(n):
        target = of.total.rows[part.places[example] - of.first_row]
        for i in range(width):
            target[i] += found[example, i]


@njit(**INNER)
def _sum_outputs(network, of, part, found):
    """Add the derivatives by offsets and item biases, which are added to the outputs."""
    total = _ZERO
    for example in range(len(found)):
        total += found[example, 0]
    for offset in network.offsets:
        of.total.dense[offset] += total
    if of.total.biases.shape[1]:
        for example in range(len(found)):
            of.total.biases[part.places[example] - of.first_row, 0] += found[example, 0]


@njit(**INNER)
def _sum_rows(rows, total):
    for example in range(len(rows)):
        for o in range(total.size):
            total[o] += rows[example, o]


@njit(**INNER)
def _bend(gradients, tangents, outputs, output_tangents, activation):
    """Turn the tangents of gradients by an activation's outputs into those of gradients by its
    inputs, in place; the gradients are still those by the outputs. The slope of an activation is a
    function of its output h, so that its tangent is the slope's derivative by h times that of h."""
    through_activation(tangents, outputs, activation)
    to = tangents.reshape(-1)
    by_outputs = gradients.reshape(-1)
    out = outputs.reshape(-1)
    moved = output_tangents.reshape(-1)
    if activation == SIGMOID:
        for i in range(to.size):
            to[i] += (_ONE - _TWO * out[i]) * moved[i] * by_outputs[i]
    elif activation == TANH:
        for i in range(to.size):
            to[i] -= _TWO * out[i] * moved[i] * by_outputs[i]
