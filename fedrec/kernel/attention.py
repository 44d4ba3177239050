# SPDX-License-Identifier: Apache-2.0
"""Blocks of causal self-attention in compiled code, forward and backward, one sequence after the
other: what is between products stays in the caches.

    y = x + m1 * (attended(norm1(x) W + b) O + o),   z = y + m2 * (relu(norm2(y) I + i) U + u)

Places after the end of a sequence take no time, and of the weights of attention those to later
places take little.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fedrec.kernel.products import (
    RELU,
    activate,
    add_views,
    exponential,
    through_activation,
    transpose,
    whole,
)
from fedrec.kernel.rows import add_rows, matrix, repeat_row
from fedrec.runtime.compilation import FAST

_EPSILON = np.float32(1e-5)  # as in `torch.nn.functional.layer_norm`
_ZERO = np.float32(0)
_ONE = np.float32(1)
_AT_ONCE = 16  # queries, or keys, whose weights are one product


class AffineOrNorm(NamedTuple):
    """An affine layer or a normalisation, or its gradients.

    Attributes:
        weight: `float32 [in, out]`; of a normalisation `[d]`.
        bias: `float32 [out]`.
    """

    weight: np.ndarray
    bias: np.ndarray


class _Layers(NamedTuple):
    """The layers of a block, in the order in which they are in memory."""

    norm1: AffineOrNorm
    attention: AffineOrNorm
    output: AffineOrNorm
    norm2: AffineOrNorm
    inner: AffineOrNorm
    outer: AffineOrNorm


class _Passed(NamedTuple):
    """What the backward pass needs of a sequence of n places, all `float32`.

    Attributes:
        unit1: `[n, d]`, inputs of mean 0 and variance 1.
        joined: `[n, 3 d]`, queries, keys and values.
        shares: `[heads, n, whole(n)]`, weights of attention.
        attended: `[n, d]`.
        unit2: `[n, d]`.
        inner: `[n, d]`, after the activation.
        scales: `[2, n]`, one over the standard deviations.
    """

    unit1: np.ndarray
    joined: np.ndarray
    shares: np.ndarray
    attended: np.ndarray
    unit2: np.ndarray
    inner: np.ndarray
    scales: np.ndarray


@njit(**FAST)
def block_size(width):
    """Number of parameters of a block."""
    return width * (6 * width + 10)


@njit(**FAST)
def passed_size(n, width, heads):
    """Number of numbers that the backward pass needs of a sequence of n places."""
    return n * (7 * width + heads * whole(n) + 2)


@njit(**FAST)
def room_size(n, width):
    """Number of numbers of working memory."""
    return 6 * n * width + (width + n) * whole(n)


@njit(**FAST)
def block_forward(values, own, mask1, mask2, heads, memory, room):
    """A block for one sequence of n places.

    Args:
        values: `float32 [n, d]`, inputs; become the outputs.
        own: `float32 [block_size]`, parameters.
        mask1, mask2: `float32 [W, d]`, what dropout multiplies by.
        heads: number of parts of d that attend on their own.
        memory: `float32 [passed_size]`, written.
        room: `float32 [room_size]`.
    """
    n, width = values.shape
    layers = _layers(own, width)
    passed = _passed(memory, n, width, heads)
    hidden = matrix(room, 0, n, width)
    normalise(values, layers.norm1, passed.unit1, passed.scales[0], hidden)
    _affine(hidden, layers.attention, passed.joined)
    _attend(passed, room[n * width :])
    _affine(passed.attended, layers.output, hidden)
    _add_product(hidden, mask1, values)
    normalise(values, layers.norm2, passed.unit2, passed.scales[1], hidden)
    _affine(hidden, layers.inner, passed.inner)
    activate(passed.inner, RELU)
    _affine(passed.inner, layers.outer, hidden)
    _add_product(hidden, mask2, values)


@njit(**FAST)
def turn_weights(own, width, turned):
    """Write the transposed weights of a block's affine layers, `float32 [6 d d]`."""
    layers = _layers(own, width)
    transpose(layers.attention.weight, matrix(turned, 0, 3 * width, width))
    transpose(layers.output.weight, matrix(turned, 3 * width * width, width, width))
    transpose(layers.inner.weight, matrix(turned, 4 * width * width, width, width))
    transpose(layers.outer.weight, matrix(turned, 5 * width * width, width, width))


@njit(**FAST)
def block_backward(gradient, own, turned, mask1, mask2, heads, memory, to_own, room):
    """The gradients of a block.

    Args:
        gradient: `float32 [n, d]`, by the outputs; becomes that by the inputs.
        turned: see `turn_weights`.
        to_own: `float32 [block_size]`, gradients of the parameters, added to.
        own, mask1, mask2, heads, memory, room: as in `block_forward`.
    """
    n, width = gradient.shape
    size = width * width
    layers = _layers(own, width)
    to = _layers(to_own, width)
    passed = _passed(memory, n, width, heads)
    hidden = matrix(room, 0, n, width)
    one = matrix(room, n * width, n, width)
    two = matrix(room, 2 * n * width, n, width)
    joined = matrix(room, 3 * n * width, n, 3 * width)
    one[:] = 0
    _add_product(gradient, mask2, one)
    _through_affine(passed.inner, one, matrix(turned, 5 * size, width, width), to.outer, two)
    through_activation(two, passed.inner, RELU)
    _scaled(passed.unit2, layers.norm2, hidden)
    _through_affine(hidden, two, matrix(turned, 4 * size, width, width), to.inner, one)
    through_norm(one, layers.norm2, passed.unit2, passed.scales[1], to.norm2, gradient)
    one[:] = 0
    _add_product(gradient, mask1, one)
    _through_affine(passed.attended, one, matrix(turned, 3 * size, width, width), to.output, two)
    _through_attention(two, passed, joined, room[6 * n * width :])
    _scaled(passed.unit1, layers.norm1, hidden)
    _through_affine(hidden, joined, matrix(turned, 0, 3 * width, width), to.attention, one)
    through_norm(one, layers.norm1, passed.unit1, passed.scales[0], to.norm1, gradient)


@njit(**FAST)
def _attend(passed, room):
    """The means of the values up to each place, by the softmax of its query times their keys."""
    n, width = passed.attended.shape
    part = width // len(passed.shares)
    factor = _ONE / np.sqrt(np.float32(part))
    keys = matrix(room, 0, part, whole(n))
    passed.attended[:] = 0
    for head in range(len(passed.shares)):
        query, key, value = _split(passed.joined, width, head * part, part)
        keys[:, n:] = 0
        transpose(key, keys)
        for first in range(0, n, _AT_ONCE):
            last = min(first + _AT_ONCE, n)
            shares = passed.shares[head, first:last, : whole(last)]
            shares[:] = 0
            add_views(factor, query[first:last], keys[:, : whole(last)], shares)
            for i in range(last - first):
                _softmax(shares[i], first + i + 1)
            out = passed.attended[first:last, head * part : (head + 1) * part]
            add_views(_ONE, shares[:, :last], value[:last], out)


@njit(**FAST)
def _through_attention(gradient, passed, joined, room):
    """From the gradient of the means `[n, d]` that of queries, keys and values `[n, 3 d]`."""
    n, width = gradient.shape
    part = width // len(passed.shares)
    factor = _ONE / np.sqrt(np.float32(part))
    values = matrix(room, 0, part, whole(n))
    moves = matrix(room, part * whole(n), n, whole(n))
    joined[:] = 0
    for head in range(len(passed.shares)):
        query, key, value = _split(passed.joined, width, head * part, part)
        to_query, to_key, to_value = _split(joined, width, head * part, part)
        own = gradient[:, head * part : (head + 1) * part]
        shares = passed.shares[head]
        values[:, n:] = 0
        transpose(value, values)
        for first in range(0, n, _AT_ONCE):
            last = min(first + _AT_ONCE, n)
            move = moves[first:last, : whole(last)]
            move[:] = 0
            add_views(_ONE, own[first:last], values[:, : whole(last)], move)
            for i in range(last - first):
                _through_softmax(move[i], shares[first + i])
            add_views(factor, move[:, :last], key[:last], to_query[first:last])
        for first in range(0, n, _AT_ONCE):
            last = min(first + _AT_ONCE, n)
            add_views(_ONE, shares[first:, first:last].T, own[first:], to_value[first:last])
            add_views(factor, moves[first:, first:last].T, query[first:], to_key[first:last])


@njit(**FAST)
def _softmax(row, count):
    """The softmax of the first numbers of a row; the others become 0."""
    most = row[0]
    for j in range(row.size):
        most = max(most, row[j] if j < count else most)
    total = _ZERO
    for j in range(row.size):
        row[j] = exponential(row[j] - most) if j < count else _ZERO
        total += row[j]
    share = _ONE / total
    for j in range(row.size):
        row[j] *= share


@njit(**FAST)
def _through_softmax(move, shares):
    """Turn a gradient by shares into one by what the softmax was taken of, in place."""
    total = _ZERO
    for j in range(move.size):
        total += move[j] * shares[j]
    for j in range(move.size):
        move[j] = shares[j] * (move[j] - total)


@njit(**FAST)
def normalise(values, layer, unit, scales, out):
    """Write values of mean 0 and variance 1, what they were multiplied by for this, and the output
    of the normalisation."""
    for i in range(len(values)):
        row = values[i]
        own = unit[i]
        total = _ZERO
        for j in range(row.size):
            total += row[j]
        mean = total / np.float32(row.size)
        square = _ZERO
        for j in range(row.size):
            own[j] = row[j] - mean
            square += own[j] * own[j]
        scale = _ONE / np.sqrt(square / np.float32(row.size) + _EPSILON)
        scales[i] = scale
        for j in range(row.size):
            own[j] *= scale
    _scaled(unit, layer, out)


@njit(**FAST)
def _scaled(unit, layer, out):
    """What a normalisation returns."""
    for i in range(len(unit)):
        own = unit[i]
        row = out[i]
        for j in range(row.size):
            row[j] = own[j] * layer.weight[j] + layer.bias[j]


@njit(**FAST)
def through_norm(gradient, layer, unit, scales, into, total):
    """Add the gradients of a normalisation's parameters, and of its inputs to a total."""
    for i in range(len(unit)):
        own = unit[i]
        row = gradient[i]
        mean = _ZERO
        along = _ZERO
        for j in range(row.size):
            into.weight[j] += row[j] * own[j]
            into.bias[j] += row[j]
            row[j] *= layer.weight[j]
            mean += row[j]
            along += row[j] * own[j]
        mean /= np.float32(row.size)
        along /= np.float32(row.size)
        to = total[i]
        for j in range(row.size):
            to[j] += scales[i] * (row[j] - mean - along * own[j])


@njit(**FAST)
def _affine(inputs, layer, out):
    repeat_row(layer.bias, out)
    add_views(_ONE, inputs, layer.weight, out)


@njit(**FAST)
def _through_affine(inputs, gradient, turned, into, before):
    """Add the gradients of a layer's parameters, and write that of its inputs; `turned` is the
    transposed weight."""
    add_views(_ONE, inputs.T, gradient, into.weight)
    add_rows(gradient, into.bias)
    before[:] = 0
    add_views(_ONE, gradient, turned, before)


@njit(**FAST)
def _add_product(values, mask, out):
    for i in range(len(out)):
        row = values[i]
        own = mask[i]
        to = out[i]
        for j in range(row.size):
            to[j] += row[j] * own[j]


@njit(**FAST)
def _split(joined, width, first, count):
    """Views of some columns of queries, keys and values."""
    last = first + count
    return (
        joined[:, first:last],
        joined[:, width + first : width + last],
        joined[:, 2 * width + first : 2 * width + last],
    )


@njit(**FAST)
def _passed(memory, n, width, heads):
    size = n * width
    after = 7 * size
    shares = memory[after : after + heads * n * whole(n)].reshape(heads, n, whole(n))
    return _Passed(
        matrix(memory, 0, n, width),
        matrix(memory, size, n, 3 * width),
        shares,
        matrix(memory, 4 * size, n, width),
        matrix(memory, 5 * size, n, width),
        matrix(memory, 6 * size, n, width),
        matrix(memory, after + shares.size, 2, n),
    )


@njit(**FAST)
def _layers(vector, width):
    """The layers in a block's parameters, or gradients."""
    size = width * width
    affine = 3 * size + 5 * width
    last = affine + size + width
    return _Layers(
        AffineOrNorm(vector[:width], vector[width : 2 * width]),
        AffineOrNorm(
            matrix(vector, 2 * width, width, 3 * width), vector[3 * size + 2 * width : affine]
        ),
        _square(vector, affine, width),
        AffineOrNorm(vector[last : last + width], vector[last + width : last + 2 * width]),
        _square(vector, last + 2 * width, width),
        _square(vector, last + 3 * width + size, width),
    )


@njit(**FAST)
def _square(vector, place, width):
    size = width * width
    bias = vector[place + size : place + size + width]
    return AffineOrNorm(matrix(vector, place, width, width), bias)
