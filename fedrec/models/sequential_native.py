# SPDX-License-Identifier: Apache-2.0
"""The sampled softmax of SASRec and its gradients in compiled code, one client's sequence after the
other, so that what is between products stays in the caches.

The forms are those of `SasRec.encode` and `fedrec.nn.softmax.sampled_cross_entropy`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedrec.kernel.attention import (
    AffineOrNorm,
    block_backward,
    block_forward,
    block_size,
    normalise,
    passed_size,
    room_size,
    through_norm,
    turn_weights,
)
from fedrec.kernel.products import add_views, exponential, transpose, whole
from fedrec.kernel.rows import aligned, matrix, whole_lines
from fedrec.runtime.compilation import FAST, compiled

_ZERO = np.float32(0)
_ONE = np.float32(1)


@compiled
def losses_with_gradients(
    embedded,
    drawn,
    counts,
    weights,
    kept,
    heads,
    scale,
    places,
    dense,
    losses,
    to_embedded,
    to_places,
    to_dense,
):
    """The weighted sum of the losses of each client's places, and its gradients.

    Args:
        embedded: `float32 [C, drawn + W + 1, d]`, embeddings of drawn items and of the sequence.
        drawn: number of drawn items.
        counts: `int64 [C]`, number of places of each sequence.
        weights: `float32 [C]`, of a place's loss.
        kept: `float32 [C, dropped, W, d]`, what dropout multiplies by.
        heads: of attention.
        scale: logarithm of what the sum of the drawn items' exponentials is multiplied by.
        places: `float32 [C, longest, d]`, embeddings of places; `[1, ...]` if clients share them.
        dense: `float32 [C, P]`, parameters of the blocks, then the last normalisation; or `[1, P]`.
        losses: `float32 [C]`, written.
        to_embedded, to_places, to_dense: the gradients, of each client, written.
    """
    width = embedded.shape[2]
    longest = embedded.shape[1] - drawn - 1
    blocks = dense.shape[1] // block_size(width)
    memory = aligned(blocks, whole_lines(passed_size(longest, width, heads)))
    turned = aligned(blocks, whole_lines(6 * width * width))
    of_loss = (width + longest) * whole(drawn)
    size = 4 * longest * width + max(room_size(longest, width), of_loss) + longest
    room = aligned(1, size)[0]
    for c in range(len(embedded)):
        shared = min(c, len(dense) - 1)
        if shared == c:
            for k in range(blocks):
                turn_weights(_block(dense[c], k, width), width, turned[k])
        to_embedded[c] = 0
        to_places[c] = 0
        to_dense[c] = 0
        losses[c] = 0
        if counts[c]:
            given = embedded[c], counts[c], drawn, kept[c]
            own = places[shared], dense[shared], turned
            to = to_embedded[c], to_places[c], to_dense[c]
            factors = np.float32(scale), weights[c]
            losses[c] = _sequence(given, heads, factors, own, to, memory, room)


def compile_losses() -> None:
    """Compile for the types of training, with one client of one place."""
    width = 2

    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, dtype=np.float32)

    rows = ones(1, 3, width)
    places = ones(1, 1, width)
    dense = ones(1, int(block_size(width)) + 2 * width)
    to = np.zeros(1, np.float32), np.zeros_like(rows), np.zeros_like(places), np.zeros_like(dense)
    counts = np.ones(1, dtype=np.int64)
    kept = ones(1, 3, 1, width)
    losses_with_gradients(rows, 1, counts, ones(1), kept, 1, 0.5, places, dense, *to)


@njit(**FAST)
def _sequence(given, heads, factors, own, to, memory, room):
    """The losses of one client, whose gradients are added."""
    embedded, n, drawn, kept = given
    places, dense, turned = own
    to_embedded, to_places, to_dense = to
    width = embedded.shape[1]
    values = matrix(room, 0, n, width)
    unit = matrix(room, n * width, n, width)
    states = matrix(room, 2 * n * width, n, width)
    scales = room[len(room) - n :]
    rest = room[3 * n * width :]
    root = np.sqrt(np.float32(width))
    for t in range(n):
        for j in range(width):
            value = root * embedded[drawn + t, j] + places[n - 1 - t, j]
            values[t, j] = value * kept[0, t, j]
    for k in range(len(memory)):
        block = _block(dense, k, width)
        block_forward(values, block, kept[2 * k + 1], kept[2 * k + 2], heads, memory[k], rest)
    normalise(values, _norm(dense, width), unit, scales, states)
    targets = embedded[drawn + 1 : drawn + 1 + n], to_embedded[drawn + 1 : drawn + 1 + n]
    others = embedded[:drawn], to_embedded[:drawn]
    gradient = matrix(rest, 0, n, width)
    loss = _sampled_loss(states, targets, others, factors, gradient, rest[n * width :])
    values[:] = 0
    through_norm(gradient, _norm(dense, width), unit, scales, _norm(to_dense, width), values)
    for k in range(len(memory) - 1, -1, -1):
        block = _block(dense, k, width)
        masks = kept[2 * k + 1], kept[2 * k + 2]
        to_block = _block(to_dense, k, width)
        block_backward(
            values, block, turned[k], masks[0], masks[1], heads, memory[k], to_block, rest
        )
    for t in range(n):
        for j in range(width):
            value = values[t, j] * kept[0, t, j]
            to_embedded[drawn + t, j] += root * value
            to_places[n - 1 - t, j] += value
    return loss


@njit(**FAST)
def _sampled_loss(states, targets, others, factors, gradient, room):
    """The weighted sum of the cross-entropies of targets among themselves and other items, and the
    gradient of the states; those of the embeddings, the second of each pair, are added."""
    scale, weight = factors
    n, width = states.shape
    count = len(others[0])
    columns = matrix(room, 0, width, whole(count))
    logits = matrix(room, columns.size, n, whole(count))
    columns[:, count:] = 0
    transpose(others[0], columns)
    logits[:] = 0
    add_views(_ONE, states, columns, logits)
    loss = 0.0
    for t in range(n):
        state = states[t]
        target = targets[0][t]
        chosen = _ZERO
        for j in range(width):
            chosen += state[j] * target[j]
        row = logits[t]
        most = chosen - scale
        for j in range(count):
            most = max(most, row[j])
        total = _ZERO
        for j in range(count):
            row[j] = exponential(row[j] - most)
            total += row[j]
        most += scale
        own = exponential(chosen - most)
        total += own
        loss += np.log(total) + most - chosen
        share = weight / total
        for j in range(count):
            row[j] *= share
        factor = own * share - weight
        for j in range(width):
            gradient[t, j] = factor * target[j]
            targets[1][t, j] += factor * state[j]
    shares = logits[:, :count]
    add_views(_ONE, shares, others[0], gradient)
    add_views(_ONE, shares.T, states, others[1])
    return weight * loss


@njit(**FAST)
def _block(dense, k, width):
    """The parameters of a block."""
    return dense[k * block_size(width) : (k + 1) * block_size(width)]


@njit(**FAST)
def _norm(dense, width):
    """The last normalisation."""
    return AffineOrNorm(dense[-2 * width : -width], dense[-width:])
