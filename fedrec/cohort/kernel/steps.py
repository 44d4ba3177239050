# SPDX-License-Identifier: Apache-2.0
"""All SGD steps of one client after another in compiled code, so that a client's parameters stay in
the caches."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedrec.cohort.kernel.inputs import backward_inputs, forward_inputs
from fedrec.cohort.kernel.memory import Batch, Client, scratch_for
from fedrec.nn.native.activations import activate, sigmoid, through_activation
from fedrec.nn.native.memory import matrix
from fedrec.nn.native.products import add_outputs, descend_weights, input_gradients
from fedrec.runtime.compilation import FAST, compiled

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
    rows,
    biases,
    codes,
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
        rows: `float32 [C, R, d]`, likewise.
        biases: `float32 [C, R, 1]` or `[C, R, 0]`, likewise.
        codes: `int64 [C, W]`, of the users' features.
        losses: `float64 [C]`, written: mean loss over the last epoch; stays as it is without steps.
    """
    items, places, labels, counts = examples
    scratch = scratch_for(network, items.shape[2], rows.shape[2])
    for client in range(len(steps)):
        own = Client(dense[client], rows[client], biases[client], codes[client], first_rows[client])
        total = 0.0
        measured = steps[client] - last_epoch[client]
        for step in range(steps[client]):
            n = counts[step, client]
            batch = Batch(
                items[step, client, :n], places[step, client, :n], labels[step, client, :n]
            )
            moving = rates[1] if step >= begins[client] else rates[0]
            total += _step(network, own, batch, moving, scratch, step >= measured)
        if last_epoch[client]:
            losses[client] = total / last_epoch[client]


@njit(**FAST)
def _step(network, own, batch, rates, scratch, measured):
    """One step on a batch; returns the mean loss before it, or 0 if it is not measured."""
    outputs = _forward(network, own, batch, scratch)
    loss = _mean_loss(outputs, batch.labels, network.logistic) if measured else 0.0
    gradient = outputs  # in the same memory
    for n in range(len(outputs)):
        target = batch.labels[n]
        error = (
            sigmoid(outputs[n, 0]) - target
            if network.logistic
            else np.float32(2) * (outputs[n, 0] - target)
        )
        gradient[n, 0] = error / np.float32(len(outputs))
    _descend_sums(network, own, batch, rates, gradient)
    _backward(network, own, batch, rates, scratch, gradient)
    return loss


@njit(**FAST)
def _layer(network, place):
    """Offset of a layer's weight, number of inputs and outputs, and offset of its bias."""
    own = network.layers[place]
    return own[0], own[1], own[2], own[3]


@njit(**FAST)
def _forward(network, own, batch, scratch):
    """Predictions `[n, 1]`; the outputs of each layer are kept in `scratch.hidden`."""
    n = len(batch.items)
    place = 0
    hidden = matrix(scratch.hidden, 0, n, network.layers[0, 2])
    forward_inputs(network, own, batch, scratch, hidden)
    for layer in range(1, len(network.layers)):
        weight, inputs, out, bias = _layer(network, layer)
        activate(hidden, network.activation)
        place += n * inputs
        following = matrix(scratch.hidden, place, n, out)
        for example in range(n):
            for o in range(out):
                following[example, o] = own.dense[bias + o] if bias >= 0 else _ZERO
        weights = matrix(own.dense, weight, inputs, out)
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
    return hidden


@njit(**FAST)
def _mean_loss(outputs, labels, logistic):
    total = 0.0
    for n in range(len(outputs)):
        y = np.float64(outputs[n, 0])
        target = np.float64(labels[n])
        if logistic:
            total += max(y, 0.0) - y * target + np.log1p(np.exp(-abs(y))) if y == y else y
        else:
            total += (y - target) ** 2
    return total / len(outputs)


@njit(**FAST)
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


@njit(**FAST)
def _backward(network, own, batch, rates, scratch, gradient):
    """The step of all layers and of the inputs; each layer propagates its gradient before it is
    updated."""
    n = len(gradient)
    place = 0
    half = 0
    for layer in range(len(network.layers) - 1):
        place += n * network.layers[layer, 2]
    for layer in range(len(network.layers) - 1, 0, -1):
        weight, inputs, out, bias = _layer(network, layer)
        place -= n * inputs
        hidden = matrix(scratch.hidden, place, n, inputs)
        weights = matrix(own.dense, weight, inputs, out)
        before = matrix(scratch.gradients[half], 0, n, inputs)
        input_gradients(gradient, weights, before, scratch.room)
        if rates.weights[layer]:
            descend_weights(rates.weights[layer], hidden, gradient, weights, scratch.room)
        if bias >= 0 and rates.biases[layer]:
            for example in range(n):
                for o in range(out):
                    own.dense[bias + o] -= rates.biases[layer] * gradient[example, o]
        through_activation(before, hidden, network.activation)
        gradient = before
        half = 1 - half
    backward_inputs(network, own, batch, rates, scratch, gradient)
