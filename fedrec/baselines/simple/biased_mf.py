# SPDX-License-Identifier: Apache-2.0
"""Biased matrix factorization by alternating least squares (Koren, Bell and Volinsky 2009,
equations 4 and 5).

    r_ui = mu + b_u + b_i + p_u . q_i
    loss = squared error + lambda (n_u (|p_u|^2 + b_u^2) + n_i (|q_i|^2 + b_i^2))

Given the items, each user's (b_u, p_u) is the solution of a ridge regression on its own ratings,
and the other way round. The penalty of a user or item counts once per rating of it (Zhou et al.
2008), which needs less care in choosing lambda. A new user is solved for from its known ratings in
the same way.

Where this differs from the paper: it names stochastic gradient descent and alternating least
squares; this is the latter, and biases are solved for together with the factors.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.config import Config, Width
from fedrec.rng import stream


class BiasedMfConfig(Config):
    """Settings of biased matrix factorization."""

    factors: Width = 20
    """Number of factors (width of p_u and q_i)."""
    regularisation: float = Field(default=0.1, gt=0)
    """Regularisation lambda per rating, > 0; about 0.05 to 0.15 for MovieLens."""
    sweeps: int = Field(default=15, ge=1)
    """Number of sweeps over users and items."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial item factors."""


class BiasedMf(RatingBaseline):
    """Factors and biases in closed form, in turns."""

    name = "biased-mf"
    Config = BiasedMfConfig
    paper = "Koren et al. 2009, eq. 4-5"
    config: BiasedMfConfig

    def fit_ratings(self, ratings: Ratings) -> None:
        """Solve for users and items in turns."""
        width = self.config.factors
        self._mean = float(ratings.values.mean()) if len(ratings.values) else 0.0
        # Columns: bias, factors. The item biases are zero in the first sweep.
        self._items = np.zeros((ratings.num_items, 1 + width))
        self._items[:, 1:] = stream(self.config.seed, "baseline-biased-mf").normal(
            0, 0.1, (ratings.num_items, width)
        )
        by_user = _Grouped(ratings.users, ratings.num_users)
        by_item = _Grouped(ratings.items, ratings.num_items)
        for _ in range(self.config.sweeps):
            users = self._solved(by_user, ratings.items, ratings.values, self._items)
            self._items = self._solved(by_item, ratings.users, ratings.values, users)

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`. Users are solved for from their known ratings."""
        own = self._solved(
            _Grouped(known.users, known.num_users), known.items, known.values, self._items
        )
        product = np.einsum("nk,nk->n", own[users, 1:], self._items[items, 1:])
        return self._mean + own[users, 0] + self._items[items, 0] + product

    def _solved(
        self, rows: _Grouped, others: np.ndarray, values: np.ndarray, fixed: np.ndarray
    ) -> np.ndarray:
        """Bias and factors of each user (or item), given those of the other side; zero without
        ratings."""
        found = np.zeros((rows.count, fixed.shape[1]))
        target = values - self._mean - fixed[others, 0]
        design = fixed[others]
        design[:, 0] = 1.0
        identity = np.eye(fixed.shape[1])
        for place, own in rows:
            part = design[own]
            gram = part.T @ part + self.config.regularisation * len(own) * identity
            found[place] = np.linalg.solve(gram, part.T @ target[own])
        return found


class _Grouped:
    """Row numbers grouped by user (or item)."""

    def __init__(self, of: np.ndarray, count: int) -> None:
        self.count = count
        self._order = np.argsort(of, kind="stable")
        self._offsets = np.concatenate([[0], np.cumsum(np.bincount(of, minlength=count))])

    def __iter__(self):
        for place in np.flatnonzero(np.diff(self._offsets)).tolist():
            yield place, self._order[self._offsets[place] : self._offsets[place + 1]]
