# SPDX-License-Identifier: Apache-2.0
"""All SGD steps of one client after another in compiled code, so that a client's parameters stay in
the caches."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedrec.cohort.kernel.inputs import backward_inputs, forward_inputs, start_base
from fedrec.cohort.kernel.memory import Client, batch_of, scratch_for
from fedrec.nn.native.activations import RELU, activate, sigmoid, through_activation
from fedrec.nn.native.memory import matrix
from fedrec.nn.native.products import add_outputs, descend_weights, input_gradients
from fedrec.nn.native.sparse_products import add_sparse_outputs, descend_sparse, sparse_enough
from fedrec.runtime.compilation import INNER, compiled

_ZERO = np.float32(0)


@compiled
def train_clients(
    network,
    rates,
    examples,
    steps,
    begins,
    last_epoch,
    first_rows,
    dense,
    tables,
    codes,
    guidance,
    losses,
):
    """Take all steps of C clients.

    Args:
        network: the model.
        rates: step sizes before late parameters move, and from then on.
        examples: items, places and labels, `[S, C, B]` each, and the number of examples
            `int64 [S, C]`.
        steps: `int64 [C]`, number of steps.
        begins: `int64 [C]`, the first step in which late parameters move.
        last_epoch: `int64 [C]`, number of steps in the last epoch.
        first_rows: `int64 [C]`, see `Client.first_row`.
        dense: `float32 [C, P]`, trained in place.
        tables: the items' rows `float32 [C, R, d]`, biases `[C, R, 1]` or `[C, R, 0]`, and rows in
            the product `[C, R, k]`, likewise.
        codes: `int64 [C, W]`, of the users' features.
        guidance: the share of the way that all rows of a client go in each step, and where to,
            `float32 [C, R, d]`; `[C, 0, d]` for a share of 0.
        losses: `float64 [C]`, written: mean loss over the last epoch; stays as it is without steps.
    """
    rows, biases, factors = tables
    share, guides = guidance
    scratch = scratch_for(network, examples[0].shape[2], rows.shape[2])
    for client in range(len(steps)):
        own = Client(
            dense[client],
            rows[client],
            biases[client],
            factors[client],
            codes[client],
            first_rows[client],
        )
        start_base(network, own, scratch)
        total = 0.0
        measured = steps[client] - last_epoch[client]
        for step in range(steps[client]):
            batch = batch_of(examples, step, client)
            moving = rates[1] if step >= begins[client] else rates[0]
            guide = share, guides[client]
            total += _step(network, own, batch, moving, guide, scratch, step >= measured)
        if last_epoch[client]:
            losses[client] = total / last_epoch[client]


@njit(**INNER)
def _step(network, own, batch, rates, guide, scratch, measured):
    """One step on a batch; returns the mean loss before it, or 0 if it is not measured."""
    outputs = _forward(network, own, batch, scratch)
    loss = mean_loss(outputs, batch.labels, network.logistic) if measured else 0.0
    gradient = outputs  # in the same memory
    for n in range(len(outputs)):
        target = batch.labels[n]
        error = (
            sigmoid(outputs[n, 0]) - target
            if network.logistic
            else np.float32(2) * (outputs[n, 0] - target)
        )
        gradient[n, 0] = error / np.float32(len(outputs))
    if guide[0]:  # the gradient is that of the rows before, of which there are copies
        _follow(own.rows, guide[0], guide[1])
    _descend_sums(network, own, batch, rates, gradient)
    _descend_product(network, own, batch, rates, scratch, gradient)
    _backward(network, own, batch, rates, scratch, gradient)
    return loss


@njit(**INNER)
def layer_at(network, place):
    """Offset of a layer's weight, number of inputs and outputs, and offset of its bias."""
    own = network.layers[place]
    return own[0], own[1], own[2], own[3]


@njit(**INNER)
def _forward(network, own, batch, scratch):
    """Predictions `[n, 1]`; the outputs of each layer are kept in `scratch.hidden`."""
    n = len(batch.items)
    place = 0
    hidden = matrix(scratch.hidden, 0, n, network.layers[0, 2])
    forward_inputs(network, own, batch, scratch, hidden)
    for layer in range(1, len(network.layers)):
        weight, inputs, out, bias = layer_at(network, layer)
        activate(hidden, network.activation)
        place += n * inputs
        following = matrix(scratch.hidden, place, n, out)
        for example in range(n):
            for o in range(out):
                following[example, o] = own.dense[bias + o] if bias >= 0 else _ZERO
        weights = matrix(own.dense, weight, inputs, out)
        sparse = network.activation == RELU and sparse_enough(hidden, out, scratch.room)
        scratch.sparse[layer] = sparse
        if sparse:
            add_sparse_outputs(hidden, weights, following)
        else:
            add_outputs(hidden, weights, following, scratch.room)
        hidden = following
    total = _ZERO
    for offset in network.offsets:
        total += own.dense[offset]
    for example in range(n):
        hidden[example, 0] += total
    if own.biases.shape[1]:
        for example in range(n):
            hidden[example, 0] += own.biases[batch.places[example] - own.first_row, 0]
    _add_product(network, own, batch, scratch, hidden)
    return hidden


@njit(**INNER)
def _add_product(network, own, batch, scratch, outputs):
    """Add what the last layer makes of the product."""
    user, width, weight = network.product
    for k in range(width):
        scratch.product[k] = own.dense[user + k] * own.dense[weight + k]
    if width:
        for example in range(len(outputs)):
            row = own.factors[batch.places[example] - own.first_row]
            total = _ZERO
            for k in range(width):
                total += row[k] * scratch.product[k]
            outputs[example, 0] += total


@njit(**INNER)
def mean_loss(outputs, labels, logistic):
    total = 0.0
    for n in range(len(outputs)):
        y = np.float64(outputs[n, 0])
        target = np.float64(labels[n])
        if logistic:
            total += max(y, 0.0) - y * target + np.log1p(np.exp(-abs(y))) if y == y else y
        else:
            total += (y - target) ** 2
    return total / len(outputs)


@njit(**INNER)
def _descend_sums(network, own, batch, rates, gradient):
    """The step of offsets and item biases, which are added to the outputs."""
    total = _ZERO
    for n in range(len(gradient)):
        total += gradient[n, 0]
    for place in range(len(network.offsets)):
        own.dense[network.offsets[place]] -= rates.offsets[place] * total
    if own.biases.shape[1] and rates.item_bias:
        for n in range(len(gradient)):
            own.biases[batch.places[n] - own.first_row, 0] -= rates.item_bias * gradient[n, 0]


@njit(**INNER)
def _descend_product(network, own, batch, rates, scratch, gradient):
    """The step of both rows in the product and of the weight that it meets; a row that is in two
    examples gets both gradients, each of the values before."""
    user, width, weight = network.product
    if width == 0:
        return
    summed = scratch.summed
    summed[:] = 0
    for example in range(len(gradient)):
        row = own.factors[batch.places[example] - own.first_row]
        for k in range(width):
            summed[k] += gradient[example, 0] * row[k]
    if rates.product_item:
        for example in range(len(gradient)):
            row = own.factors[batch.places[example] - own.first_row]
            factor = rates.product_item * gradient[example, 0]
            for k in range(width):
                row[k] -= factor * scratch.product[k]
    weight_rate = rates.weights[len(network.layers) - 1]
    for k in range(width):
        of_user = own.dense[user + k]
        of_weight = own.dense[weight + k]
        own.dense[user + k] = of_user - rates.product_user * of_weight * summed[k]
        own.dense[weight + k] = of_weight - weight_rate * of_user * summed[k]


@njit(**INNER)
def _follow(rows, share, guide):
    """Move rows `[R, d]` a share of the way to others."""
    for r in range(len(guide)):
        for i in range(rows.shape[1]):
            rows[r, i] += share * (guide[r, i] - rows[r, i])


@njit(**INNER)
def _backward(network, own, batch, rates, scratch, gradient):
    """The step of all layers and of the inputs; each layer propagates its gradient before it is
    updated."""
    n = len(gradient)
    place = 0
    half = 0
    for layer in range(len(network.layers) - 1):
        place += n * network.layers[layer, 2]
    for layer in range(len(network.layers) - 1, 0, -1):
        weight, inputs, out, bias = layer_at(network, layer)
        place -= n * inputs
        hidden = matrix(scratch.hidden, place, n, inputs)
        weights = matrix(own.dense, weight, inputs, out)
        before = matrix(scratch.gradients[half], 0, n, inputs)
        rate = rates.weights[layer]
        sparse = scratch.sparse[layer]
        if sparse:
            descend_sparse(rate, hidden, gradient, weights, before, scratch.room)
        else:
            input_gradients(gradient, weights, before, scratch.room)
            if rate:
                descend_weights(rate, hidden, gradient, weights, scratch.room)
        if bias >= 0 and rates.biases[layer]:
            for example in range(n):
                for o in range(out):
                    own.dense[bias + o] -= rates.biases[layer] * gradient[example, o]
        if not sparse:
            through_activation(before, hidden, network.activation)
        gradient = before
        half = 1 - half
    backward_inputs(network, own, batch, rates, scratch, gradient)
