# SPDX-License-Identifier: Apache-2.0
"""Second-order gradients in compiled code, by numbers with tangents.

The gradient of a query's loss through gradient steps on a support, in compiled code (Finn,
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

from fedrec.kernel.products import SIGMOID, TANH, activate, sigmoid, through_activation
from fedrec.kernel.rows import aligned, matrix
from fedrec.runtime.compilation import INNER, compiled
from fedrec.training.network import Batch, batch_of
from fedrec.training.steps import layer_at, mean_loss

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
        add_product: see `fedrec.kernel.products`.
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


_TWO = np.float32(2)


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
        add_product: see `fedrec.kernel.products`.
        losses: `float64 [C]`, written: mean loss of the query.
    """
    rows, biases = tables
    most = len(examples[0])
    memory = memory_for(network, rows.shape[2], add_product)
    dense_path = aligned(most, dense.shape[1])
    rows_path = np.empty((most, *rows.shape[1:]), np.float32)
    biases_path = np.empty((most, *biases.shape[1:]), np.float32)
    total = values_like(dense[0], rows[0], biases[0])
    along = values_like(dense[0], rows[0], biases[0])
    ones = np.ones(dense.shape[1], np.float32)
    for client in range(len(steps)):
        own = Values(dense[client], rows[client], biases[client])
        code = codes[client]
        first = first_rows[client]
        last = steps[client] - 1
        if last < 0:
            continue
        copy_values(own, Values(dense_path[0], rows_path[0], biases_path[0]))
        for step in range(last + 1):
            at = Values(dense_path[step], rows_path[step], biases_path[step])
            batch = batch_of(examples, step, client)
            clear_values(total)
            of = Derivative(at, at, total, False, code, first, len(batch.items))
            losses[client] = _add_derivative(network, of, batch, memory, step == last)
            if step < last:
                after = Values(dense_path[step + 1], rows_path[step + 1], biases_path[step + 1])
                copy_values(at, after)
                subtract(after, rates, total)
        if second:
            for step in range(last - 1, -1, -1):
                at = Values(dense_path[step], rows_path[step], biases_path[step])
                batch = batch_of(examples, step, client)
                clear_values(along)
                subtract(along, rates, total)
                of = Derivative(at, along, total, True, code, first, len(batch.items))
                _add_derivative(network, of, batch, memory, False)
        subtract(own, (ones, _ONE, _ONE), total)


@njit(**INNER)
def _add_derivative(network, of, batch, memory, measured):
    """Add a derivative to its total; returns the mean loss, or 0 if it is not measured."""
    _begin(network, of, memory)
    total = 0.0
    for start in range(0, len(batch.items), TOGETHER):
        end = min(start + TOGETHER, len(batch.items))
        part = Batch(batch.items[start:end], batch.places[start:end], batch.labels[start:end])
        outputs = _forward(network, of, part, memory)
        if measured:
            total += mean_loss(outputs[0], part.labels, network.logistic) * (end - start)
        _differentiate(network, of, part, outputs)
        _backward(network, of, part, memory, outputs)
    _end(network, of, memory)
    return total / len(batch.items)


@njit(**INNER)
def _first_place(network, start):
    """Place of a row of the first layer's weights."""
    return network.layers[0, 0] + start * network.layers[0, 2]


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
    memory.base[:] = 0
    memory.to_base[:] = 0
    memory.projected[:] = 0
    memory.to_projected[:] = 0
    if bias >= 0:
        _repeat(of.at.dense[bias : bias + out], memory.base[:1])
        _repeat(of.along.dense[bias : bias + out], memory.base[1:])
    for user in network.users:
        width = user[1]
        _mean_rows(user, of.codes, of.at.dense, memory.means[0])
        _mean_rows(user, of.codes, of.along.dense, memory.means[1])
        means = both(memory.means, user[2], 1, width)
        weights = matrices_of(of, _first_place(network, user[2]), width, out)
        add_linear(means, weights, both(memory.base, 0, 1, out), of.second, memory)
    first = 0
    for feature in network.features:
        categories = feature[5]
        width = feature[1]
        rows = matrices_of(of, feature[0], categories, width)
        weights = matrices_of(of, _first_place(network, feature[2]), width, out)
        projected = both(memory.projected, first * out, categories, out)
        add_linear(rows, weights, projected, of.second, memory)
        first += categories


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
        place = _first_place(network, user[2])
        through_linear(
            both(memory.means, user[2], 1, width),
            matrices_of(of, place, width, out),
            both(memory.to_base, 0, 1, out),
            matrix(dense, place, width, out),
            both(memory.to_means, 0, 1, width),
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
        place = _first_place(network, feature[2])
        through_linear(
            matrices_of(of, feature[0], categories, width),
            matrices_of(of, place, width, out),
            both(memory.to_projected, first * out, categories, out),
            matrix(dense, place, width, out),
            both(memory.to_categories, 0, categories, width),
            of.second,
            memory,
        )
        for i in range(categories * width):
            dense[feature[0] + i] += memory.to_categories[which, i]
        first += categories


@njit(**INNER)
def _forward(network, of, part, memory):
    """Predictions `[n, 1]` and their tangents."""
    n = len(part.items)
    outputs = both(memory.hidden, 0, n, network.layers[0, 2])
    _first_layer(network, of, part, memory, outputs)
    place = 0
    for layer in range(1, len(network.layers)):
        weight, inputs, out, bias = layer_at(network, layer)
        hidden = outputs
        activate(hidden[0], network.activation)
        if of.second:
            through_activation(hidden[1], hidden[0], network.activation)
        place += TOGETHER * inputs
        outputs = both(memory.hidden, place, n, out)
        outputs[0][:] = 0
        outputs[1][:] = 0
        if bias >= 0:
            _repeat(of.at.dense[bias : bias + out], outputs[0])
            _repeat(of.along.dense[bias : bias + out], outputs[1])
        add_linear(hidden, matrices_of(of, weight, inputs, out), outputs, of.second, memory)
    _add_sums(network, of.at, of.first_row, part, outputs[0])
    _add_sums(network, of.along, of.first_row, part, outputs[1])
    return outputs


@njit(**INNER)
def _first_layer(network, of, part, memory, outputs):
    """The outputs of the first layer and their tangents, before the activation."""
    n = len(part.items)
    _repeat(memory.base[0], outputs[0])
    _repeat(memory.base[1], outputs[1])
    width = of.at.rows.shape[1]
    if width:
        gathered = both(memory.gathered, 0, n, width)
        for example in range(n):
            row = part.places[example] - of.first_row
            for i in range(width):
                gathered[0][example, i] = of.at.rows[row, i]
                gathered[1][example, i] = of.along.rows[row, i]
        place = _first_place(network, network.item_start)
        weights = matrices_of(of, place, width, network.layers[0, 2])
        add_linear(gathered, weights, outputs, of.second, memory)
    _couple_categories(network, part, outputs[0], memory.projected[0], True)
    if of.second:
        _couple_categories(network, part, outputs[1], memory.projected[1], True)


@njit(**INNER)
def _add_sums(network, values, first_row, part, outputs):
    """Add offsets and items' biases to the outputs."""
    total = _ZERO
    for offset in network.offsets:
        total += values.dense[offset]
    for example in range(len(outputs)):
        outputs[example, 0] += total
        if values.biases.shape[1]:
            outputs[example, 0] += values.biases[part.places[example] - first_row, 0]


@njit(**INNER)
def _repeat(row, out):
    for example in range(len(out)):
        for o in range(row.size):
            out[example, o] = row[o]


@njit(**INNER)
def _couple_categories(network, part, rows, projected, forward):
    """Add to the row of each example the mean of the products of its item's categories; backward,
    add the rows, as gradients, to those of the categories."""
    width = rows.shape[1]
    for example in range(len(rows)):
        item = part.items[example]
        row = rows[example]
        first = 0
        for feature in network.features:
            share = network.item_shares[item, feature[6]]
            for column in range(feature[3], feature[4]):
                code = network.item_codes[item, column]
                if code < 0:
                    break
                of_code = projected[(first + code) * width : (first + code + 1) * width]
                source, target = (of_code, row) if forward else (row, of_code)
                for o in range(width):
                    target[o] += share * source[o]
            first += feature[5]


@njit(**INNER)
def _differentiate(network, of, part, outputs):
    """Turn predictions and their tangents into the gradient by them and its tangents, in place."""
    found, tangents = outputs
    examples = np.float32(of.examples)
    for n in range(len(found)):
        target = part.labels[n]
        if network.logistic:
            chance = sigmoid(found[n, 0])
            found[n, 0] = (chance - target) / examples
            tangents[n, 0] *= chance * (_ONE - chance) / examples
        else:
            found[n, 0] = _TWO * (found[n, 0] - target) / examples
            tangents[n, 0] *= _TWO / examples


@njit(**INNER)
def _backward(network, of, part, memory, gradients):
    """Add the derivatives of what differs between examples, and gather those of what they have in
    common."""
    n = len(part.items)
    _add_to_sums(network, of, part, gradients[1] if of.second else gradients[0])
    place = 0
    half = 0
    for layer in range(len(network.layers) - 1):
        place += TOGETHER * network.layers[layer, 2]
    for layer in range(len(network.layers) - 1, 0, -1):
        weight, inputs, out, bias = layer_at(network, layer)
        place -= TOGETHER * inputs
        hidden = both(memory.hidden, place, n, inputs)
        before = both(memory.gradients[half : half + 2], 0, n, inputs)
        if bias >= 0:
            found = gradients[1] if of.second else gradients[0]
            _sum_rows(found, of.total.dense[bias : bias + out])
        weights = matrices_of(of, weight, inputs, out)
        to_weights = matrix(of.total.dense, weight, inputs, out)
        through_linear(hidden, weights, gradients, to_weights, before, of.second, memory)
        if of.second:
            _bend(before, hidden, network.activation)
        through_activation(before[0], hidden[0], network.activation)
        gradients = before
        half = 2 - half
    for which in range(2 if of.second else 1):
        _sum_rows(gradients[which], memory.to_base[which])
        _couple_categories(network, part, gradients[which], memory.to_projected[which], False)
    if of.at.rows.shape[1]:
        _through_rows(network, of, part, memory, gradients)


@njit(**INNER)
def _through_rows(network, of, part, memory, gradients):
    """Add the derivatives by the items' rows and by the weights that multiply them."""
    n = len(part.items)
    width = of.at.rows.shape[1]
    out = network.layers[0, 2]
    place = _first_place(network, network.item_start)
    to_rows = both(memory.to_rows, 0, n, width)
    through_linear(
        both(memory.gathered, 0, n, width),
        matrices_of(of, place, width, out),
        gradients,
        matrix(of.total.dense, place, width, out),
        to_rows,
        of.second,
        memory,
    )
    found = to_rows[1] if of.second else to_rows[0]
    for example in range(n):
        target = of.total.rows[part.places[example] - of.first_row]
        for i in range(width):
            target[i] += found[example, i]


@njit(**INNER)
def _add_to_sums(network, of, part, found):
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
def _bend(gradients, outputs, activation):
    """Turn the tangents of gradients by an activation's outputs into those of gradients by its
    inputs, in place; the gradients are still those by the outputs. The slope of an activation is a
    function of its output h, so that its tangent is the slope's derivative by h times that of h."""
    through_activation(gradients[1], outputs[0], activation)
    by_outputs = gradients[0].reshape(-1)
    tangents = gradients[1].reshape(-1)
    out = outputs[0].reshape(-1)
    moved = outputs[1].reshape(-1)
    if activation == SIGMOID:
        for i in range(out.size):
            tangents[i] += (_ONE - _TWO * out[i]) * moved[i] * by_outputs[i]
    elif activation == TANH:
        for i in range(out.size):
            tangents[i] -= _TWO * out[i] * moved[i] * by_outputs[i]
