# SPDX-License-Identifier: Apache-2.0
"""All SGD steps of a client in compiled code: input layer, descent, and additive embeddings."""

import numpy as np
from numba import njit

from fedrec.kernel.compiled import FAST, INLINED, ORDERED, compiled
from fedrec.kernel.products import (
    VECTOR,
    activate,
    add_outputs,
    descend_weights,
    input_gradients,
    mean_loss,
    sigmoid,
    through_activation,
    vector_dot,
)
from fedrec.kernel.rows import add_rows, copy_row, count_codes, follow, matrix, repeat_row
from fedrec.training.arrays import Client, batch_of, scratch_for

# The first layer of a declared model in compiled code: embeddings times weights, and the step of
# both.
#
# The user's part is the same for all examples of a batch, so its product is computed once, and that
# of the next batch together with the step of its weights, which are most of the layer's. Few
# categories of an item feature occur in a batch: their rows are multiplied by the feature's part of
# the weights, and examples sum rows of the product.

_ZERO = np.float32(0)


@njit(**INLINED)
def _start_base(network, params, scratch):
    """The part of bias and user in the outputs of the first layer, in `scratch.base`."""
    base = _bias_alone(network, params, scratch)
    for number in range(len(network.users)):
        _add_user(network.users[number], network, params, scratch, base)


@njit(**INLINED)
def _forward_inputs(network, params, batch, scratch, hidden):
    """Outputs `[n, out]` of the first layer, before the activation, given the part of bias and user
    in `scratch.base`."""
    repeat_row(scratch.base, hidden)
    width = params.rows.shape[1]
    if width and hidden.shape[1] == 1:
        weights = _weights(network, params, network.item_start, width).reshape(-1)
        for example in range(len(hidden)):
            row = params.rows[batch.rows[example] - params.first_row]
            total = _ZERO
            for i in range(width):
                total += row[i] * weights[i]
            hidden[example, 0] += total
    elif width:
        gathered = scratch.gathered[: len(hidden)]
        for example in range(len(hidden)):
            row = batch.rows[example] - params.first_row
            for i in range(width):
                gathered[example, i] = params.rows[row, i]
        weights = _weights(network, params, network.item_start, width)
        add_outputs(gathered, weights, hidden, scratch.room)
    for number in range(len(network.features)):
        _add_feature(network.features[number], network, params, batch, scratch, hidden)


@njit(**INLINED)
def _backward_inputs(network, params, batch, rates, scratch, gradient):
    """The step of all parameters of the first layer, given the gradient `[n, out]` of its outputs;
    `scratch.base` is that of the next step then."""
    summed = scratch.base_gradient
    summed[:] = 0
    add_rows(gradient, summed)
    bias = network.layers[0, 3]
    weight_rate = rates.weights[0]
    if bias >= 0:
        for o in range(summed.size):
            params.dense[bias + o] -= rates.biases[0] * summed[o]
    base = _bias_alone(network, params, scratch)
    for number in range(len(network.users)):
        user = network.users[number]
        _descend_user(user, network, params, rates.users[number], weight_rate, scratch, base)
    width = params.rows.shape[1]
    if width and gradient.shape[1] == 1:
        weights = _weights(network, params, network.item_start, width).reshape(-1)
        of_rows = batch.rows - params.first_row
        sizes = rates.item, rates.weights[0]
        _descend_scored_rows(sizes, params.rows, of_rows, weights, gradient.reshape(-1))
    elif width:
        _descend_rows(network, params, batch, rates, scratch, gradient)
    for number in range(len(network.features)):
        feature = network.features[number]
        rate = rates.features[number]
        _descend_feature(feature, network, params, batch, rate, weight_rate, scratch, gradient)


@njit(**INLINED)
def _bias_alone(network, params, scratch):
    """`scratch.base` with the bias, or zeros."""
    base = scratch.base
    bias = network.layers[0, 3]
    for o in range(base.size):
        base[o] = params.dense[bias + o] if bias >= 0 else _ZERO
    return base


@njit(**INLINED)
def _weights(network, params, start, rows):
    """Some rows of the first layer's weights."""
    out = network.layers[0, 2]
    return matrix(params.dense, network.layers[0, 0] + start * out, rows, out)


@njit(**INLINED)
def _add_user(user, network, params, scratch, base):
    """The part of one of the user's features; the mean of its rows is kept for the backward
    pass."""
    table = user[0]
    width = user[1]
    start = user[2]
    first = user[3]
    last = user[4]
    mean = scratch.user[start : start + width]
    mean[:] = 0
    codes = params.codes[first:last]
    count = max(1, count_codes(codes))
    for code in codes:
        if code >= 0:
            for i in range(width):
                mean[i] += params.dense[table + code * width + i] / np.float32(count)
    weights = _weights(network, params, start, width)
    for i in range(width):
        row = weights[i]
        for o in range(base.size):
            base[o] += mean[i] * row[o]


@njit(**INLINED)
def _descend_user(user, network, params, rate, weight_rate, scratch, base):
    """The step of one of the user's features, row by row of its weights, and its part of the next
    base: a row is in the L1 cache then."""
    table = user[0]
    width = user[1]
    start = user[2]
    first = user[3]
    last = user[4]
    mean = scratch.user[start : start + width]
    weights = _weights(network, params, start, width)
    codes = params.codes[first:last]
    count = np.float32(max(1, count_codes(codes)))
    share = rate / count
    gradient = scratch.base_gradient
    for i in range(width):
        row = weights[i]
        total = _dot(row, gradient)
        factor = weight_rate * mean[i]
        mean[i] = 0
        for code in codes:
            if code >= 0:
                params.dense[table + code * width + i] -= share * total
        for code in codes:
            if code >= 0:
                mean[i] += params.dense[table + code * width + i] / count
        for o in range(base.size):
            row[o] -= factor * gradient[o]
            base[o] += mean[i] * row[o]


@njit(**INLINED)
def _dot(row, vector):
    first = vector.size - vector.size % VECTOR
    total = _ZERO
    for o in range(first, vector.size):
        total += row[o] * vector[o]
    if first:
        addresses = row.ctypes.data, vector.ctypes.data
        total += vector_dot(*addresses, first)  # pyright: ignore[reportCallIssue]
    return total


@njit(**INLINED)
def _descend_rows(network, params, batch, rates, scratch, gradient):
    """The step of the items' own rows and of the weights that multiply them; a row that was
    gathered twice gets both gradients."""
    width = params.rows.shape[1]
    examples = len(gradient)
    gathered = scratch.gathered[:examples]
    weights = _weights(network, params, network.item_start, width)
    to_rows = scratch.to_rows[:examples]
    if rates.item:
        input_gradients(gradient, weights, to_rows, scratch.room)
    if rates.weights[0]:
        descend_weights(rates.weights[0], gathered, gradient, weights, scratch.room)
    if rates.item:
        for example in range(examples):
            row = batch.rows[example] - params.first_row
            for i in range(width):
                params.rows[row, i] -= rates.item * to_rows[example, i]


@njit(**ORDERED)
def _descend_scored_rows(rates, rows, indices, weights, errors):
    """Take the step of the items' own rows and of the weights that multiply them, in a layer of one
    output, without copies of the rows.

    Args:
        rates: step sizes of the rows and of the weights; 0 leaves them as they are.
        rows: `float32 [R, d]`, changed in place.
        indices: `int64 [n]`, the row of each example.
        weights: `float32 [d]`, changed in place.
        errors: `float32 [n]`, gradient of each output.
    """
    before = weights.copy()
    for n in range(len(errors) if rates[1] else 0):
        row = rows[indices[n]]
        for i in range(weights.size):
            if len(errors) == 1:  # rounded as a product of matrices is
                weights[i] -= rates[1] * row[i] * errors[n]
            else:
                weights[i] -= rates[1] * errors[n] * row[i]
    for n in range(len(errors) if rates[0] else 0):
        row = rows[indices[n]]
        for i in range(weights.size):
            row[i] -= rates[0] * (errors[n] * before[i])


@njit(**INLINED)
def _add_feature(feature, network, params, batch, scratch, hidden):
    first = feature[3]
    last = feature[4]
    _copy_categories(feature, network, params, batch, scratch)
    rows = _rows_of_categories(feature, scratch)
    if len(rows) == 0:
        return
    numbers = scratch.numbers[feature[6]]
    projected = matrix(scratch.projected, 0, len(rows), hidden.shape[1])
    weights = _weights(network, params, feature[2], feature[1])
    projected[:] = 0
    add_outputs(rows, weights, projected, scratch.room)
    if hidden.shape[1] == 1:
        scratch.projected[-1] = 0
        _score_categories(feature, network, batch.items, numbers, scratch.projected, hidden)
        return
    for example in range(len(hidden)):
        item = batch.items[example]
        target = hidden[example]
        share = network.item_shares[item, feature[6]]
        for column in range(first, last):
            code = network.item_codes[item, column]
            if code < 0:
                break
            source = projected[numbers[code]]
            for o in range(target.size):
                target[o] += share * source[o]


@njit(**ORDERED)
def _score_categories(feature, network, items, numbers, projected, scores):
    """Add the categories' parts to scores `[n, 1]`. Padding adds the 0 at the end of `projected`,
    because loops of varying lengths take longer."""
    for n in range(len(items)):
        share = network.item_shares[items[n], feature[6]]
        for column in range(feature[3], feature[4]):
            number = numbers[network.item_codes[items[n], column]]
            scores[n, 0] += share * projected[number]


@njit(**ORDERED)
def _sum_by_category(feature, network, items, numbers, sums, errors):
    """Add the examples' gradients `[n, 1]` to those of their categories, and of padding."""
    for n in range(len(items)):
        share = network.item_shares[items[n], feature[6]]
        for column in range(feature[3], feature[4]):
            sums[numbers[network.item_codes[items[n], column]]] += share * errors[n, 0]


@njit(**INLINED)
def _descend_feature(feature, network, params, batch, rate, weight_rate, scratch, gradient):
    table = feature[0]
    width = feature[1]
    first = feature[3]
    last = feature[4]
    rows = _rows_of_categories(feature, scratch)
    if len(rows) == 0:
        return
    numbers = scratch.numbers[feature[6]]
    by_category = matrix(scratch.projected, 0, len(rows), gradient.shape[1])
    by_category[:] = 0
    if gradient.shape[1] == 1:
        _sum_by_category(feature, network, batch.items, numbers, scratch.projected, gradient)
    else:
        for example in range(len(gradient)):
            item = batch.items[example]
            source = gradient[example]
            share = network.item_shares[item, feature[6]]
            for column in range(first, last):
                code = network.item_codes[item, column]
                if code < 0:
                    break
                target = by_category[numbers[code]]
                for o in range(source.size):
                    target[o] += share * source[o]
    weights = _weights(network, params, feature[2], width)
    to_rows = matrix(scratch.to_categories, 0, len(rows), width)
    if rate:
        input_gradients(by_category, weights, to_rows, scratch.room)
    if weight_rate:
        descend_weights(weight_rate, rows, by_category, weights, scratch.room)
    if rate:
        for number in range(len(rows)):
            target = params.dense[table + scratch.categories[feature[6], number] * width :]
            for i in range(width):
                target[i] -= rate * to_rows[number, i]


@njit(**INLINED)
def _copy_categories(feature, network, params, batch, scratch):
    """Find the categories that occur in a batch, and copy their rows; all is in `scratch`, see
    `_rows_of_categories`."""
    table = feature[0]
    width = feature[1]
    numbers = scratch.numbers[feature[6]]
    categories = scratch.categories[feature[6]]
    for category in range(feature[5]):
        numbers[category] = -1
    count = 0
    numbers[-1] = len(scratch.projected) - 1  # of padding, whose code is -1
    for item in batch.items:
        for column in range(feature[3], feature[4]):
            code = network.item_codes[item, column]
            if numbers[code] < 0:
                numbers[code] = count
                categories[count] = code
                count += 1
    scratch.category_counts[feature[6]] = count
    rows = _rows_of_categories(feature, scratch)
    for number in range(count):
        copy_row(params.dense[table + categories[number] * width :], rows[number])


@njit(**INLINED)
def _rows_of_categories(feature, scratch):
    """The rows `[P, width]`, as they were before the step, of the P categories that occur in a
    batch."""
    return matrix(
        scratch.of_categories[feature[6]], 0, scratch.category_counts[feature[6]], feature[1]
    )


# All SGD steps of one client after another in compiled code, so that a client's parameters stay in
# the caches.


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
        params = Client(
            dense[client],
            rows[client],
            biases[client],
            factors[client],
            codes[client],
            first_rows[client],
        )
        _start_base(network, params, scratch)
        total = 0.0
        measured = steps[client] - last_epoch[client]
        for step in range(steps[client]):
            batch = batch_of(examples, step, client)
            moving = rates[1] if step >= begins[client] else rates[0]
            guide = share, guides[client]
            total += _step(network, params, batch, moving, guide, scratch, step >= measured)
        if last_epoch[client]:
            losses[client] = total / last_epoch[client]


@njit(**INLINED)
def _step(network, params, batch, rates, guide, scratch, measured):
    """One step on a batch; returns the mean loss before it, or 0 if it is not measured."""
    outputs = _forward(network, params, batch, scratch)
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
        follow(params.rows, guide[0], guide[1])
    _descend_sums(network, params, batch, rates, gradient)
    _descend_product(network, params, batch, rates, scratch, gradient)
    _backward(network, params, batch, rates, scratch, gradient)
    return loss


@njit(**INLINED)
def _layer_at(network, layer):
    """Offset of a layer's weight, number of inputs and outputs, and offset of its bias."""
    numbers = network.layers[layer]
    return numbers[0], numbers[1], numbers[2], numbers[3]


@njit(**INLINED)
def _forward(network, params, batch, scratch):
    """Predictions `[n, 1]`; the outputs of each layer are kept in `scratch.hidden`."""
    n = len(batch.items)
    start = 0
    hidden = matrix(scratch.hidden, 0, n, network.layers[0, 2])
    _forward_inputs(network, params, batch, scratch, hidden)
    for layer in range(1, len(network.layers)):
        weight, inputs, out, bias = _layer_at(network, layer)
        activate(hidden, network.activation)
        start += n * inputs
        following = matrix(scratch.hidden, start, n, out)
        for example in range(n):
            for o in range(out):
                following[example, o] = params.dense[bias + o] if bias >= 0 else _ZERO
        weights = matrix(params.dense, weight, inputs, out)
        add_outputs(hidden, weights, following, scratch.room)
        hidden = following
    total = _ZERO
    for offset in network.offsets:
        total += params.dense[offset]
    for example in range(n):
        hidden[example, 0] += total
    if params.biases.shape[1]:
        for example in range(n):
            hidden[example, 0] += params.biases[batch.rows[example] - params.first_row, 0]
    _add_product(network, params, batch, scratch, hidden)
    return hidden


@njit(**INLINED)
def _add_product(network, params, batch, scratch, outputs):
    """Add the last layer's result for the product."""
    user, width, weight = network.product
    for k in range(width):
        scratch.product[k] = params.dense[user + k] * params.dense[weight + k]
    if width:
        for example in range(len(outputs)):
            row = params.factors[batch.rows[example] - params.first_row]
            total = _ZERO
            for k in range(width):
                total += row[k] * scratch.product[k]
            outputs[example, 0] += total


@njit(**INLINED)
def _descend_sums(network, params, batch, rates, gradient):
    """The step of offsets and item biases, which are added to the outputs."""
    total = _ZERO
    for n in range(len(gradient)):
        total += gradient[n, 0]
    for number in range(len(network.offsets)):
        params.dense[network.offsets[number]] -= rates.offsets[number] * total
    if params.biases.shape[1] and rates.item_bias:
        for n in range(len(gradient)):
            params.biases[batch.rows[n] - params.first_row, 0] -= rates.item_bias * gradient[n, 0]


@njit(**INLINED)
def _descend_product(network, params, batch, rates, scratch, gradient):
    """The step of both rows in the product and of the weight that it meets; a row that is in two
    examples gets both gradients, each of the values before."""
    user, width, weight = network.product
    if width == 0:
        return
    summed = scratch.summed
    summed[:] = 0
    for example in range(len(gradient)):
        row = params.factors[batch.rows[example] - params.first_row]
        for k in range(width):
            summed[k] += gradient[example, 0] * row[k]
    if rates.product_item:
        for example in range(len(gradient)):
            row = params.factors[batch.rows[example] - params.first_row]
            factor = rates.product_item * gradient[example, 0]
            for k in range(width):
                row[k] -= factor * scratch.product[k]
    weight_rate = rates.weights[len(network.layers) - 1]
    for k in range(width):
        of_user = params.dense[user + k]
        of_weight = params.dense[weight + k]
        params.dense[user + k] = of_user - rates.product_user * of_weight * summed[k]
        params.dense[weight + k] = of_weight - weight_rate * of_user * summed[k]


@njit(**INLINED)
def _backward(network, params, batch, rates, scratch, gradient):
    """The step of all layers and of the inputs; each layer propagates its gradient before it is
    updated."""
    n = len(gradient)
    start = 0
    half = 0
    for layer in range(len(network.layers) - 1):
        start += n * network.layers[layer, 2]
    for layer in range(len(network.layers) - 1, 0, -1):
        weight, inputs, out, bias = _layer_at(network, layer)
        start -= n * inputs
        hidden = matrix(scratch.hidden, start, n, inputs)
        weights = matrix(params.dense, weight, inputs, out)
        before = matrix(scratch.gradients[half], 0, n, inputs)
        rate = rates.weights[layer]
        input_gradients(gradient, weights, before, scratch.room)
        if rate:
            descend_weights(rate, hidden, gradient, weights, scratch.room)
        if bias >= 0 and rates.biases[layer]:
            for example in range(n):
                for o in range(out):
                    params.dense[bias + o] -= rates.biases[layer] * gradient[example, o]
        through_activation(before, hidden, network.activation)
        gradient = before
        half = 1 - half
    _backward_inputs(network, params, batch, rates, scratch, gradient)


# All steps of clients whose item embeddings are a shared and a personal part, added, under a linear
# score function (FedRAP, Li et al. 2024, algorithm 1), in compiled code.

_ONE = np.float32(1)
_TWO = np.float32(2)


@compiled
def train_additive(examples, steps, last_epoch, score, shared, personal, rates, terms, losses):
    """Take all steps of C clients on the cross-entropy, minus a weight times the mean squared
    difference of both parts, plus another times the mean size of the shared one.

    Args:
        examples: items, places and labels, `[S, C, B]` each, and the number of examples
            `int64 [S, C]`.
        steps: `int64 [C]`, number of steps.
        last_epoch: `int64 [C]`, number of steps in the last epoch.
        score: weights `float32 [C, d]` and biases `[C]`, trained in place.
        shared: `float32 [C, R, d]`, the touched rows, likewise.
        personal: `float32 [C, items, d]`, whole tables, likewise.
        rates: step sizes `float32` of the score function, the shared and the personal part.
        terms: the two weights, `float32`.
        losses: `float64 [C]`, written: mean cross-entropy over the last epoch; stays as it is
            without steps.
    """
    items, rows_of_examples, labels, counts = examples
    weights, biases = score
    width = weights.shape[1]
    parts = np.empty((2, items.shape[2], width), np.float32)
    errors = np.empty(items.shape[2], np.float32)
    moved = np.empty(width, np.float32)
    for client in range(len(steps)):
        first = client * shared.shape[1]
        total = 0.0
        for step in range(steps[client]):
            n = counts[step, client]
            rows = rows_of_examples[step, client, :n] - first
            step_items = items[step, client, :n]
            values = (weights[client], biases[client : client + 1])
            tables = (shared[client], personal[client])
            loss = _errors(values, tables, rows, step_items, labels[step, client], parts, errors)
            if step >= steps[client] - last_epoch[client]:
                total += loss
            _descend_parts(values[0], tables, rows, step_items, rates, terms, parts, errors)
            _descend_score(values, rates[0], parts, errors[:n], moved)
        if last_epoch[client]:
            losses[client] = total / last_epoch[client]


@njit(**FAST)
def _errors(score, tables, rows, items, labels, parts, errors):
    """Copies of the rows of both parts, and each example's share in the gradient of the score;
    returns the mean cross-entropy."""
    weight, bias = score
    share = _ONE / np.float32(len(rows))
    total = 0.0
    for n in range(len(rows)):
        c = tables[0][rows[n]]
        d = tables[1][items[n]]
        y = np.float32(0)
        for i in range(weight.size):
            parts[0, n, i] = c[i]
            parts[1, n, i] = d[i]
            y += weight[i] * (c[i] + d[i])
        y += bias[0]
        errors[n] = (sigmoid(y) - labels[n]) * share
        exact = np.float64(y)
        total += max(exact, 0.0) - exact * labels[n] + np.log1p(np.exp(-abs(exact)))
    return total / len(rows)


@njit(**FAST)
def _descend_parts(weight, tables, rows, items, rates, terms, parts, errors):
    """The step of both parts; a row that is in two examples gets both gradients, each of the values
    before."""
    share = _ONE / np.float32(len(rows)) / np.float32(weight.size)
    apart = _TWO * terms[0] * share
    sparse = terms[1] * share
    for n in range(len(rows)):
        c = tables[0][rows[n]]
        d = tables[1][items[n]]
        for i in range(weight.size):
            before = parts[0, n, i]
            fitted = errors[n] * weight[i]
            parted = apart * (parts[1, n, i] - before)
            sign = np.float32(before > 0) - np.float32(before < 0)
            c[i] -= rates[1] * (fitted + parted + sparse * sign)
            d[i] -= rates[2] * (fitted - parted)


@njit(**FAST)
def _descend_score(score, rate, parts, errors, moved):
    weight, bias = score
    moved[:] = 0
    for n in range(len(errors)):
        bias[0] -= rate * errors[n]
        for i in range(weight.size):
            moved[i] += errors[n] * (parts[0, n, i] + parts[1, n, i])
    for i in range(weight.size):
        weight[i] -= rate * moved[i]
