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

import numpy as np
from numba import njit

from fedrec.cohort.kernel.memory import Batch, batch_of
from fedrec.cohort.kernel.steps import layer_at, mean_loss
from fedrec.cohort.kernel.tangents import (
    TOGETHER,
    Derivative,
    Values,
    add_linear,
    both,
    clear_values,
    copy_values,
    matrices_of,
    memory_for,
    subtract,
    through_linear,
    values_like,
)
from fedrec.nn.native.activations import SIGMOID, TANH, activate, sigmoid, through_activation
from fedrec.nn.native.memory import aligned, matrix
from fedrec.runtime.compilation import INNER, compiled

_ZERO = np.float32(0)
_ONE = np.float32(1)
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
        add_product: see `fedrec.nn.native.products`.
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
