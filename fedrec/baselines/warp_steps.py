# SPDX-License-Identifier: Apache-2.0
"""The steps of WARP in native code."""

import numpy as np
from numba import njit

_LARGEST_WEIGHT = 10.0


@njit(nogil=True, cache=True)
def rank_weight(num_items, tries):
    """Weight of a step by the number of items that had to be drawn: ln(max(1, floor((items - 1) /
    tries))), at most 10."""
    return min(_LARGEST_WEIGHT, np.log(max(1.0, np.floor((num_items - 1) / tries))))


@njit(nogil=True, cache=True)
def _drawn(state, below):
    """A random number below another, by xorshift64*."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64(((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % np.uint64(below))


@njit(nogil=True, cache=True)
def _sum(has_from, has, row, table, out):
    """Write the sum of the parts of a row."""
    out[:] = 0
    for place in range(has_from[row], has_from[row + 1]):
        out += table[has[place]]


@njit(nogil=True, cache=True)
def _move(has_from, has, row, table, squares, gradient, rate):
    """A step of Adagrad on each of a row's parts."""
    for place in range(has_from[row], has_from[row + 1]):
        part = has[place]
        for d in range(len(gradient)):
            table[part, d] -= rate / np.sqrt(squares[part, d]) * gradient[d]
            squares[part, d] += gradient[d] * gradient[d]


@njit(nogil=True, cache=True)
def _bias(has_from, has, row, biases):
    total = np.float32(0)
    for place in range(has_from[row], has_from[row + 1]):
        total += biases[has[place]]
    return total


@njit(nogil=True, cache=True)
def _move_bias(has_from, has, row, biases, squares, gradient, rate):
    for place in range(has_from[row], has_from[row + 1]):
        part = has[place]
        biases[part] -= rate / np.sqrt(squares[part]) * gradient
        squares[part] += gradient * gradient


@njit(nogil=True, cache=True)
def descend(
    order, owner, liked_from, liked, user_from, user_has, item_from, item_has,
    users, user_squares, items, item_squares, biases, bias_squares,
    learn_items, rate, max_sampled, state,
):  # fmt: skip
    """One step for each liked pair in `order`; `owner[n]` is the user of pair n, `liked[n]` its
    item, ascending."""
    num_items = len(item_from) - 1
    width = users.shape[1]
    p = np.empty(width, np.float32)
    q = np.empty(width, np.float32)
    other = np.empty(width, np.float32)
    for n in order:
        user = owner[n]
        item = liked[n]
        own = liked[liked_from[user] : liked_from[user + 1]]
        _sum(user_from, user_has, user, users, p)
        _sum(item_from, item_has, item, items, q)
        score = np.dot(p, q) + _bias(item_from, item_has, item, biases)
        for tries in range(1, max_sampled + 1):
            drawn = _drawn(state, num_items)
            _sum(item_from, item_has, drawn, items, other)
            if np.dot(p, other) + _bias(item_from, item_has, drawn, biases) <= score - 1:
                continue
            place = np.searchsorted(own, drawn)
            if place < len(own) and own[place] == drawn:
                continue
            weight = np.float32(rank_weight(num_items, tries))
            difference = weight * (other - q)
            if learn_items:
                _move(item_from, item_has, item, items, item_squares, -weight * p, rate)
                _move(item_from, item_has, drawn, items, item_squares, weight * p, rate)
                _move_bias(item_from, item_has, item, biases, bias_squares, -weight, rate)
                _move_bias(item_from, item_has, drawn, biases, bias_squares, weight, rate)
            _move(user_from, user_has, user, users, user_squares, difference, rate)
            break
