# SPDX-License-Identifier: Apache-2.0
"""One user's part of the loss, a function of the similarities between this user's rated items
only."""

from typing import NamedTuple

import numpy as np


class Rest(NamedTuple):
    """Parts of a user's denominators and numerators that do not depend on learned similarities.

    Attributes:
        prior: added to the denominators, >= 0.
        weight: sum of the fixed similarities to items without learned similarities.
        total: the same, each multiplied by the user's deviation.
        low, high: `float64 [n]`, least and largest predicted deviation of each item.
    """

    prior: float
    weight: float
    total: float
    low: np.ndarray
    high: np.ndarray


def own_gradient(
    similarity: np.ndarray, deviations: np.ndarray, rest: Rest
) -> tuple[np.ndarray, np.ndarray]:
    """Gradient of half the user's sum of squared errors (PNBM, equation 5, with signs), and the
    errors.

    Args:
        similarity: `float64 [n, n]`, between the user's items; its diagonal is ignored.
        deviations: `float64 [n]`, the user's ratings minus the items' means.
        rest: the parts that are not learned.

    Returns:
        `float64 [n, n]`, zero on the diagonal, and `float64 [n]`.
    """
    own = similarity.copy()
    np.fill_diagonal(own, 0.0)
    below = rest.prior + rest.weight + np.abs(own).sum(axis=1)
    known = below > 0
    below = np.where(known, below, 1.0)
    guess = (own @ deviations + rest.total) / below
    inside = np.clip(guess, rest.low, rest.high)
    errors = inside - deviations
    steps = np.where(known & (inside == guess), errors / below, 0.0)
    found = np.sign(own)
    found *= -guess[:, None]
    found += deviations
    found *= steps[:, None]
    np.fill_diagonal(found, 0.0)
    return found, errors
