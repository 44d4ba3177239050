# SPDX-License-Identifier: Apache-2.0
"""All steps of clients whose item embeddings are a shared and a personal part, added, under a
linear score function (FedRAP, Li et al. 2024, algorithm 1), in compiled code."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedrec.nn.native.activations import sigmoid
from fedrec.runtime.compilation import FAST, compiled

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
    items, places, labels, counts = examples
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
            rows = places[step, client, :n] - first
            own = items[step, client, :n]
            values = (weights[client], biases[client : client + 1])
            tables = (shared[client], personal[client])
            loss = _errors(values, tables, rows, own, labels[step, client], parts, errors)
            if step >= steps[client] - last_epoch[client]:
                total += loss
            _descend_parts(values[0], tables, rows, own, rates, terms, parts, errors)
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
