# SPDX-License-Identifier: Apache-2.0
"""Membership signals: one number per user, larger if a model fits the user's data better.

Carlini et al. 2022 use `log(p / (1 - p))` of the right class, because it is nearly normal. Our
models' scores for ranking are that number already. A user has several positives: we take their
mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from fedrec.data.population import Population

Signal = Literal["positives", "contrast"]


def fit_signals(
    scores: np.ndarray, population: Population, users: np.ndarray, signal: Signal
) -> np.ndarray:
    """How well scores fit the users' training rows.

    Args:
        scores: `float [n, items]`, the model's scores of the catalogue for each user: logits, or
            predicted ratings.
        population: the users' data.
        users: `int64 [n]`.
        signal: ranking: `"positives"`, the mean logit of a user's positives; `"contrast"`, the same
            minus the mean logit of all other items, which removes the general level of a model's
            logits. For ratings both are minus the mean squared error.

    Returns:
        `float64 [n]`; 0 for a user without positives (without rows, for ratings).
    """
    found = np.zeros(len(users))
    for place, user in enumerate(users.tolist()):
        data = population.client(user)
        own = scores[place].astype(np.float64)
        if population.task == "rating":
            found[place] = (
                -np.square(own[data.items] - data.labels).mean() if len(data.items) else 0.0
            )
        elif len(data.positives):
            found[place] = own[data.positives].mean()
            if signal == "contrast" and len(data.positives) < len(own):
                found[place] -= np.delete(own, data.positives).mean()
    return found
