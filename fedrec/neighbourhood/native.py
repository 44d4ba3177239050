# SPDX-License-Identifier: Apache-2.0
"""Sums over a user's own ratings in compiled code: predictions of a neighbourhood model and their
gradients."""

import numpy as np
from numba import njit

from fedrec.kernel.compiled import FAST, compiled


@compiled
def weighted_sums(similarity, offsets, items, deviations, users, targets, limit, above, below):
    """Numerator and denominator of equation 2 for pairs of a user and an item.

    Args:
        similarity: `float64 [items, items]`.
        offsets: `int64 [users + 1]`.
        items: `int64 [ratings]`.
        deviations: `float64 [ratings]`, ratings less their items' means.
        users: `int64 [n]`.
        targets: `int64 [n]`, the item of each pair, which is not a neighbour of itself.
        limit: largest number of neighbours; those with the largest absolute similarity are used.
        above, below: `float64 [n]`, outputs: numerators and denominators.
    """
    for place in range(len(users)):
        first = offsets[users[place]]
        last = offsets[users[place] + 1]
        row = similarity[targets[place]]
        least = (
            _least(row, items[first:last], targets[place], limit) if last - first > limit else 0.0
        )
        total = 0.0
        weight = 0.0
        for entry in range(first, last):
            value = row[items[entry]]
            if items[entry] != targets[place] and abs(value) >= least:
                total += value * deviations[entry]
                weight += abs(value)
        above[place] = total
        below[place] = weight


@njit(**FAST)
def _least(row, items, target, limit):
    """The `limit`-th largest absolute similarity to the user's other items."""
    found = np.abs(row[items[items != target]])
    return (
        np.partition(found, len(found) - limit)[len(found) - limit] if len(found) > limit else 0.0
    )


@compiled
def add_gradients(similarity, offsets, items, deviations, means, users, examples, bounds, gradient):
    """Add the gradients of half the squared errors of some ratings (equation 5, with the sign of
    each similarity).

        df/ds_ij = (d_uj - sign(s_ij) f) / D,    D = prior + sum_j |s_ij|

    Args:
        similarity: `float64 [items, items]`.
        offsets, items, deviations: as in `weighted_sums`; deviations are from `means`.
        means: `float64 [items]`.
        users: `int64 [n]`, the user of each example.
        examples: `int64 [n]`, its index among the ratings.
        bounds: error, factor, floor, prior, low, high, see `fedrec.neighbourhood.learned.Bounds`.
        gradient: `float64 [items, items]`, added to.

    Returns:
        Sum of the squared errors before they are bounded.
    """
    most, widest, floor, prior, low, high = bounds
    loss = 0.0
    for place in range(len(examples)):
        own = users[place]
        example = examples[place]
        target = items[example]
        row = similarity[target]
        into = gradient[target]
        total = 0.0
        weight = 0.0
        for entry in range(offsets[own], offsets[own + 1]):
            value = row[items[entry]]
            if entry != example:
                total += value * deviations[entry]
                weight += abs(value)
        weight = max(prior + weight, floor)
        if weight == 0.0:
            loss += deviations[example] ** 2
            continue
        guess = total / weight
        inside = min(max(guess, low - means[target]), high - means[target])
        error = inside - deviations[example]
        loss += error * error
        if inside != guess:
            continue
        step = min(max(error, -most), most) / weight
        for entry in range(offsets[own], offsets[own + 1]):
            if entry != example:
                value = row[items[entry]]
                pull = deviations[entry] - np.sign(value) * guess
                into[items[entry]] += step * min(max(pull, -widest), widest)
    return loss
