# SPDX-License-Identifier: Apache-2.0
"""The states of gated recurrent units in compiled code, forward and backward, one client after the
other: what is between products stays in the caches, and the gradient of a client's weight is one
product over all places.

The forms are those of `fedrec.nn.layers`.
"""

import numpy as np
from numba import njit

from fedrec.kernel.compiled import FAST, compiled
from fedrec.kernel.products import add_views, sigmoid, tanh, transpose
from fedrec.kernel.rows import add_row, add_rows, aligned, copy_row, repeat_row

_ONE = np.float32(1)


@compiled
def recurrent_forward(given, present, weight, bias, states, gates, recalled):
    """The states of each client's sequences.

    Args:
        given: `float32 [C, W, B, 3 d]`, what the inputs of W places add to reset gate, update gate
            and new state.
        present: `bool [C, W, B]`, false where a sequence has no item; `[C, 0, 0]` if all have one.
        weight: `float32 [C, d, 3 d]`, of the state; `[1, ...]` if clients share it.
        bias: `float32 [C, 3 d]`, or `[1, ...]`.
        states: `float32 [C, W, B, d]`, written.
        gates: `float32 [C, W, B, 3 d]`, written: gates and new states.
        recalled: `float32 [C, W, B, d]`, written: what a state adds to the new one.
    """
    steps, sequences, width = states.shape[1:]
    added = aligned(sequences, 3 * width)
    zeros = aligned(sequences, width)
    zeros[:] = 0
    for c in range(len(given)):
        shared = min(c, len(weight) - 1)
        for t in range(steps):
            before = states[c, t - 1] if t else zeros
            repeat_row(bias[shared], added)
            if t:
                add_views(_ONE, before, weight[shared], added)
            for b in range(sequences):
                if present.shape[1] and not present[c, t, b]:
                    copy_row(before[b], states[c, t, b])
                else:
                    inputs = given[c, t, b], added[b], before[b]
                    _next_state(inputs, gates[c, t, b], recalled[c, t, b], states[c, t, b])


@compiled
def recurrent_backward(gradient, present, weight, states, gates, recalled, to):
    """The gradients of each client.

    Args:
        gradient: `float32 [C, W, B, d]`, by the states.
        present, weight, states, gates, recalled: as in `recurrent_forward`.
        to: the gradients, written: of `given`; of the weight, `float32 [C, d, 3 d]`; of the bias,
            `float32 [C, 3 d]`.
    """
    to_given, to_weight, to_bias = to
    steps, sequences, width = states.shape[1:]
    turned = aligned(3 * width, width)
    zeros = aligned(sequences, width)
    zeros[:] = 0
    carried = aligned(sequences, width)
    to_added = aligned(steps * sequences, 3 * width)
    for c in range(len(states)):
        if c < len(weight):
            transpose(weight[c], turned)
        carried[:] = 0
        for t in range(steps - 1, -1, -1):
            before = states[c, t - 1] if t else zeros
            now = to_added[t * sequences : (t + 1) * sequences]
            for b in range(sequences):
                add_row(gradient[c, t, b], carried[b])
                if present.shape[1] and not present[c, t, b]:
                    to_given[c, t, b] = 0
                    now[b] = 0
                else:
                    saved = gates[c, t, b], recalled[c, t, b], before[b]
                    _through_state(saved, carried[b], to_given[c, t, b], now[b])
            if t:
                add_views(_ONE, now, turned, carried)
        to_weight[c] = 0
        if steps > 1 and sequences:
            earlier = states[c].reshape(steps * sequences, width)[: (steps - 1) * sequences]
            add_views(_ONE, earlier.T, to_added[sequences:], to_weight[c])
        to_bias[c] = 0
        add_rows(to_added, to_bias[c])


@njit(**FAST)
def _next_state(given, gates, recalled, state):
    """One step of one sequence."""
    inputs, added, before = given
    width = state.size
    for j in range(2 * width):
        gates[j] = sigmoid(inputs[j] + added[j])
    for j in range(width):
        recalled[j] = added[2 * width + j]
    for j in range(width):
        gates[2 * width + j] = tanh(inputs[2 * width + j] + gates[j] * recalled[j])
    for j in range(width):
        new = gates[2 * width + j]
        state[j] = new + gates[width + j] * (before[j] - new)


@njit(**FAST)
def _through_state(saved, carried, to_given, to_added):
    """Gradients of one step of one sequence; that by its state becomes that by the one before,
    without what it has by the weight."""
    gates, recalled, before = saved
    width = carried.size
    for j in range(width):
        new = gates[2 * width + j]
        to_given[2 * width + j] = carried[j] * (_ONE - gates[width + j]) * (_ONE - new * new)
    for j in range(width):
        update = gates[width + j]
        new = gates[2 * width + j]
        to_given[width + j] = carried[j] * (before[j] - new) * update * (_ONE - update)
    for j in range(width):
        reset = gates[j]
        to_given[j] = to_given[2 * width + j] * recalled[j] * reset * (_ONE - reset)
    for j in range(2 * width):
        to_added[j] = to_given[j]
    for j in range(width):
        to_added[2 * width + j] = to_given[2 * width + j] * gates[j]
    for j in range(width):
        carried[j] *= gates[width + j]
