# SPDX-License-Identifier: Apache-2.0
"""The first layer of a declared model in compiled code: embeddings times weights, and the step of
both.

The user's part is the same for all examples of a batch, so its product is computed once, and that
of the next batch together with the step of its weights, which are most of the layer's. Few
categories of an item feature occur in a batch: their rows are multiplied by the feature's part of
the weights, and examples sum rows of the product.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedrec.nn.native.memory import matrix
from fedrec.nn.native.products import add_outputs, descend_weights, input_gradients
from fedrec.nn.native.rows import add_rows, copy_row, repeat_row
from fedrec.nn.native.weight_rows import TOGETHER, move_and_sum, row_dots
from fedrec.runtime.compilation import INNER

_ZERO = np.float32(0)


@njit(**INNER)
def start_base(network, own, scratch):
    """The part of bias and user in the outputs of the first layer, in `scratch.base`."""
    base = _bias_alone(network, own, scratch)
    for place in range(len(network.users)):
        _add_user(network.users[place], network, own, scratch, base)


@njit(**INNER)
def forward_inputs(network, own, batch, scratch, hidden):
    """Outputs `[n, out]` of the first layer, before the activation, given the part of bias and user
    in `scratch.base`."""
    repeat_row(scratch.base, hidden)
    width = own.rows.shape[1]
    if width:
        gathered = scratch.gathered[: len(hidden)]
        for example in range(len(hidden)):
            copy_row(own.rows[batch.places[example] - own.first_row], gathered[example])
        weights = _weights(network, own, network.item_start, width)
        add_outputs(gathered, weights, hidden, scratch.room)
    for place in range(len(network.features)):
        _add_feature(network.features[place], network, own, batch, scratch, hidden)


@njit(**INNER)
def backward_inputs(network, own, batch, rates, scratch, gradient):
    """The step of all parameters of the first layer, given the gradient `[n, out]` of its outputs;
    `scratch.base` is that of the next step then."""
    summed = scratch.base_gradient
    summed[:] = 0
    add_rows(gradient, summed)
    bias = network.layers[0, 3]
    weight_rate = rates.weights[0]
    if bias >= 0:
        for o in range(summed.size):
            own.dense[bias + o] -= rates.biases[0] * summed[o]
    base = _bias_alone(network, own, scratch)
    for place in range(len(network.users)):
        user = network.users[place]
        _descend_user(user, network, own, rates.users[place], weight_rate, scratch, base)
    width = own.rows.shape[1]
    if width:
        _descend_rows(network, own, batch, rates, scratch, gradient)
    for place in range(len(network.features)):
        feature = network.features[place]
        rate = rates.features[place]
        _descend_feature(feature, network, own, batch, rate, weight_rate, scratch, gradient)


@njit(**INNER)
def _bias_alone(network, own, scratch):
    """`scratch.base` with the bias, or zeros."""
    base = scratch.base
    bias = network.layers[0, 3]
    for o in range(base.size):
        base[o] = own.dense[bias + o] if bias >= 0 else _ZERO
    return base


@njit(**INNER)
def _weights(network, own, start, rows):
    """Some rows of the first layer's weights."""
    out = network.layers[0, 2]
    return matrix(own.dense, network.layers[0, 0] + start * out, rows, out)


@njit(**INNER)
def _codes(codes):
    """Number of codes in a row that are not padding."""
    count = 0
    for code in codes:
        count += code >= 0
    return count


@njit(**INNER)
def _add_user(user, network, own, scratch, base):
    """The part of one of the user's features; the mean of its rows is kept for the backward
    pass."""
    table = user[0]
    width = user[1]
    start = user[2]
    first = user[3]
    last = user[4]
    mean = scratch.user[start : start + width]
    mean[:] = 0
    codes = own.codes[first:last]
    count = max(1, _codes(codes))
    for code in codes:
        if code >= 0:
            for i in range(width):
                mean[i] += own.dense[table + code * width + i] / np.float32(count)
    weights = _weights(network, own, start, width)
    for i in range(width):
        row = weights[i]
        for o in range(base.size):
            base[o] += mean[i] * row[o]


@njit(**INNER)
def _descend_user(user, network, own, rate, weight_rate, scratch, base):
    """The step of one of the user's features, row by row of its weights, and its part of the next
    base: a row is in the L1 cache then."""
    table = user[0]
    width = user[1]
    start = user[2]
    first = user[3]
    last = user[4]
    mean = scratch.user[start : start + width]
    weights = _weights(network, own, start, width)
    codes = own.codes[first:last]
    count = np.float32(max(1, _codes(codes)))
    share = rate / count
    row = 0
    while row < width:
        rows = TOGETHER if width - row >= TOGETHER else 1
        totals = scratch.totals[:rows]
        factors = scratch.factors[:rows]
        own_mean = mean[row : row + rows]
        row_dots(weights[row : row + rows], scratch.base_gradient, totals)
        for n in range(rows):
            factors[n] = -weight_rate * own_mean[n]
            own_mean[n] = 0
        for code in codes:
            if code >= 0:
                values = own.dense[table + code * width + row :]
                for n in range(rows):
                    values[n] -= share * totals[n]
        for code in codes:
            if code >= 0:
                values = own.dense[table + code * width + row :]
                for n in range(rows):
                    own_mean[n] += values[n] / count
        move_and_sum(weights[row : row + rows], factors, scratch.base_gradient, own_mean, base)
        row += rows


@njit(**INNER)
def _descend_rows(network, own, batch, rates, scratch, gradient):
    """The step of the items' own rows and of the weights that multiply them; a row that was
    gathered twice gets both gradients."""
    width = own.rows.shape[1]
    examples = len(gradient)
    gathered = scratch.gathered[:examples]
    weights = _weights(network, own, network.item_start, width)
    to_rows = scratch.to_rows[:examples]
    if rates.item:
        input_gradients(gradient, weights, to_rows, scratch.room)
    if rates.weights[0]:
        descend_weights(rates.weights[0], gathered, gradient, weights, scratch.room)
    if rates.item:
        for example in range(examples):
            target = own.rows[batch.places[example] - own.first_row]
            source = to_rows[example]
            for i in range(width):
                target[i] -= rates.item * source[i]


@njit(**INNER)
def _add_feature(feature, network, own, batch, scratch, hidden):
    first = feature[3]
    last = feature[4]
    _copy_categories(feature, network, own, batch, scratch)
    rows = _rows_of_categories(feature, scratch)
    if len(rows) == 0:
        return
    numbers = scratch.numbers[feature[6]]
    projected = matrix(scratch.projected, 0, len(rows), hidden.shape[1])
    weights = _weights(network, own, feature[2], feature[1])
    projected[:] = 0
    add_outputs(rows, weights, projected, scratch.room)
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


@njit(**INNER)
def _descend_feature(feature, network, own, batch, rate, weight_rate, scratch, gradient):
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
    weights = _weights(network, own, feature[2], width)
    to_rows = matrix(scratch.to_categories, 0, len(rows), width)
    if rate:
        input_gradients(by_category, weights, to_rows, scratch.room)
    if weight_rate:
        descend_weights(weight_rate, rows, by_category, weights, scratch.room)
    if rate:
        for number in range(len(rows)):
            target = own.dense[table + scratch.categories[feature[6], number] * width :]
            for i in range(width):
                target[i] -= rate * to_rows[number, i]


@njit(**INNER)
def _copy_categories(feature, network, own, batch, scratch):
    """Find the categories that occur in a batch, and copy their rows; all is in `scratch`, see
    `_rows_of_categories`."""
    table = feature[0]
    width = feature[1]
    numbers = scratch.numbers[feature[6]]
    categories = scratch.categories[feature[6]]
    for category in range(feature[5]):
        numbers[category] = -1
    count = 0
    for item in batch.items:
        for column in range(feature[3], feature[4]):
            code = network.item_codes[item, column]
            if code < 0:
                break
            if numbers[code] < 0:
                numbers[code] = count
                categories[count] = code
                count += 1
    scratch.category_counts[feature[6]] = count
    rows = _rows_of_categories(feature, scratch)
    for number in range(count):
        copy_row(own.dense[table + categories[number] * width :], rows[number])


@njit(**INNER)
def _rows_of_categories(feature, scratch):
    """The rows `[P, width]`, as they were before the step, of the P categories that occur in a
    batch."""
    return matrix(
        scratch.of_categories[feature[6]], 0, scratch.category_counts[feature[6]], feature[1]
    )
