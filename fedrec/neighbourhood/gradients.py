# SPDX-License-Identifier: Apache-2.0
"""Predictions of a probabilistic neighbourhood model, and gradients of its loss (PNBM, equations 2
to 5).

    f_ui = m_i + sum_j s_ij (r_uj - m_j) / (prior + sum_j |s_ij|)

with j over the items that u rated, without i.

Where this differs from the paper:

- Equation 5 leaves out the sign of the similarity; it is here.
- With `prior` 0 predictions are the same for c S as for S, so a penalty on S has no minimiser and
  only shrinks S. A `prior` above 0 shrinks predictions towards the item's mean, more so for users
  with fewer ratings.
"""

import math
from typing import NamedTuple

import numpy as np

from fedrec.neighbourhood.profiles import Profiles

EVERY = 2**62
"""No limit on the number of neighbours."""


class Bounds(NamedTuple):
    """Bounds on an example's gradient; unbounded by default.

    Attributes:
        error: largest magnitude of the prediction's error.
        factor: largest magnitude of `d_uj - sign(s_ij) f`.
        floor: least denominator.
        prior: added to every denominator, >= 0.
        low, high: the scale of ratings; predictions beyond it are clipped and have no gradient.
    """

    error: float = math.inf
    factor: float = math.inf
    floor: float = 0.0
    prior: float = 0.0
    low: float = -math.inf
    high: float = math.inf


UNBOUNDED = Bounds()


def predicted(
    similarity: np.ndarray,
    known: Profiles,
    means: np.ndarray,
    users: np.ndarray,
    items: np.ndarray,
    *,
    prior: float = 0.0,
    limit: int = EVERY,
) -> np.ndarray:
    """Equation 2, `float64 [rows]`; NaN where no neighbour was rated and there is no prior.

    Args:
        similarity: `float64 [items, items]`.
        known: the users' ratings, including item means.
        means: `float64 [items]`.
        users: `int64 [rows]`.
        items: `int64 [rows]`.
        prior: added to the denominators.
        limit: largest number of neighbours; those with the largest absolute similarity among the
            user's rated items are used.
    """
    from fedrec.neighbourhood.native import (
        weighted_sums,  # imports Numba, which is slow and only needed for predictions
    )

    own = known.centred(means)
    above = np.empty(len(users))
    below = np.empty(len(users))
    weighted_sums(similarity, own.offsets, own.items, own.values, users, items, limit, above, below)
    below += prior
    return means[items] + np.divide(above, below, out=np.full(len(users), np.nan), where=below > 0)


class Examples:
    """Ratings that a model learns from, each predicted from its user's other ratings.

    Args:
        profiles: the ratings.
        means: `float64 [items]`, the items' means.
    """

    def __init__(self, profiles: Profiles, means: np.ndarray) -> None:
        self.means = means
        self.own = profiles.centred(means)
        self.users = profiles.users

    def __len__(self) -> int:
        return len(self.users)

    def gradient(
        self, similarity: np.ndarray, drawn: np.ndarray, bounds: Bounds = UNBOUNDED
    ) -> tuple[np.ndarray, float]:
        """Gradient of half the sum of squared errors of some examples, and that sum of squares.

        Args:
            similarity: `float64 [items, items]`.
            drawn: `int64 [n]`, indices of the examples; repeated ones count repeatedly.
            bounds: bounds on each example's gradient.

        Returns:
            The gradient, `float64 [items, items]`, and the sum of squared errors.
        """
        from fedrec.neighbourhood.native import add_gradients

        found = np.zeros_like(similarity)
        own = self.own
        users = self.users[drawn]
        loss = add_gradients(
            similarity,
            own.offsets,
            own.items,
            own.values,
            self.means,
            users,
            drawn,
            tuple(bounds),
            found,
        )
        return found, float(loss)
