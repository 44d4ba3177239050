# SPDX-License-Identifier: Apache-2.0
"""Gradient descent on factors in compiled code, one rating after the other."""

from fedrec.runtime.compilation import compiled


@compiled
def descend_factors(
    users, items, values, noise, order, user_factors, item_factors, rate, regularisation, most,
    user_biases, item_biases, biased, learn_items,
):  # fmt: skip
    """One pass over ratings: e = r - b_u - b_i - p_u . q_i + noise, clamped; p_u and q_i, and the
    biases, are updated together.

    Args:
        users, items: `int64 [ratings]`.
        values: `float64 [ratings]`.
        noise: `float64 [ratings]`, added to each rating's error.
        order: `int64 [n]`, the ratings in the order of their steps.
        user_factors: `float64 [users, d]`, changed in place.
        item_factors: `float64 [items, d]`, likewise.
        rate: step size.
        regularisation: lambda.
        most: largest magnitude of an error.
        user_biases, item_biases: `float64 [users]` and `[items]`, changed in place if `biased`.
        biased: whether biases learn.
        learn_items: whether what belongs to items learns.
    """
    for step in range(len(order)):
        rating = order[step]
        user = users[rating]
        item = items[rating]
        own = user_factors[user]
        other = item_factors[item]
        guess = user_biases[user] + item_biases[item]
        for k in range(len(own)):
            guess += own[k] * other[k]
        error = min(max(values[rating] - guess + noise[rating], -most), most)
        if biased:
            user_biases[user] += rate * (error - regularisation * user_biases[user])
            if learn_items:
                item_biases[item] += rate * (error - regularisation * item_biases[item])
        for k in range(len(own)):
            before = own[k]
            own[k] += rate * (error * other[k] - regularisation * before)
            if learn_items:
                other[k] += rate * (error * before - regularisation * other[k])
