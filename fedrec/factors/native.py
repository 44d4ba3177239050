# SPDX-License-Identifier: Apache-2.0
"""Gradient descent on factors in compiled code, one rating after the other."""

from fedrec.runtime.compilation import compiled


@compiled
def descend_factors(
    users, items, values, noise, order, user_factors, item_factors, rate, regularisation, most
):
    """One pass over ratings: e = r - p_u . q_i + noise, clamped; p_u and q_i are updated together.

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
    """
    for step in range(len(order)):
        rating = order[step]
        own = user_factors[users[rating]]
        other = item_factors[items[rating]]
        guess = 0.0
        for k in range(len(own)):
            guess += own[k] * other[k]
        error = min(max(values[rating] - guess + noise[rating], -most), most)
        for k in range(len(own)):
            before = own[k]
            own[k] += rate * (error * other[k] - regularisation * before)
            other[k] += rate * (error * before - regularisation * other[k])
