# SPDX-License-Identifier: Apache-2.0
"""Biased matrix factorization by stochastic gradient descent (Funk 2006; Koren et al. 2009), which
libraries call SVD.

    r_ui = mu + b_u + b_i + p_u . q_i

One step after the other, for each rating, users ascending and each one's ratings in the order of
the data, the same in every epoch: with the error e, b += rate (e - lambda b) and p += rate (e q -
lambda p), and likewise for the item. Order and defaults are those of Surprise.

For a new user, bias and factors start at zero and are found by the same steps on its known ratings,
with the items fixed. Predictions are clipped to the range of the training ratings.
"""

import numpy as np
from pydantic import Field

from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.config import Config, Width
from fedrec.rng import stream

_INIT_STD = 0.1  # of the factors, as in Surprise


class SvdConfig(Config):
    """Settings of biased matrix factorization by gradient descent."""

    factors: Width = 100
    """Number of factors (width of p_u and q_i)."""
    epochs: int = Field(default=20, ge=1)
    """Epochs over the ratings."""
    learning_rate: float = Field(default=0.005, gt=0)
    """Learning rate."""
    regularisation: float = Field(default=0.02, ge=0)
    """Regularisation lambda."""
    seed: int = Field(default=0, ge=0)
    """Of the initial factors."""


class Svd(RatingBaseline):
    """Factors and biases, rating by rating."""

    name = "svd"
    Config = SvdConfig
    paper = "Funk 2006; Koren et al. 2009"
    config: SvdConfig

    def fit_ratings(self, ratings: Ratings) -> None:
        """Train from fresh factors."""
        config = self.config
        random = stream(self.config.seed, "baseline-svd")
        sizes = (ratings.num_users, config.factors), (ratings.num_items, config.factors)
        users, items = (random.normal(0, _INIT_STD, size) for size in sizes)
        self._learn(ratings, users, items)

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`. Training users keep their fitted factors, new users
        are folded in."""
        own = self._users.copy()
        biases = self._user_biases.copy()
        own[~self._trained] = 0.0
        biases[~self._trained] = 0.0
        new = ~self._trained[known.users]
        fresh = Ratings(
            known.num_users, known.num_items, known.users[new], known.items[new], known.values[new]
        )
        self._descend(fresh, own, biases, self._items, self._item_biases, False)
        product = np.einsum("nk,nk->n", own[users], self._items[items])
        return (self._mean + biases[users] + self._item_biases[items] + product).clip(*self._range)

    def _learn(self, ratings: Ratings, users: np.ndarray, items: np.ndarray) -> None:
        """Train from given factors `float64 [users, factors]` and `[items, factors]`."""
        values = ratings.values if len(ratings.values) else np.zeros(1)
        self._mean = float(values.mean())
        self._range = (float(values.min()), float(values.max()))
        self._users = users
        self._items = items
        self._user_biases = np.zeros(len(users))
        self._item_biases = np.zeros(len(items))
        self._trained = np.bincount(ratings.users, minlength=ratings.num_users) > 0
        self._descend(ratings, users, self._user_biases, items, self._item_biases, True)
        self._items[np.bincount(ratings.items, minlength=ratings.num_items) == 0] = 0.0

    def _descend(
        self,
        ratings: Ratings,
        users: np.ndarray,
        user_biases: np.ndarray,
        items: np.ndarray,
        item_biases: np.ndarray,
        learn_items: bool,
    ) -> None:
        """All epochs; the tables change in place."""
        from fedrec.factors.native import descend_factors

        config = self.config
        rates = (config.learning_rate, config.regularisation, np.inf)
        order = np.argsort(ratings.users, kind="stable")
        noise = np.zeros(len(order))
        columns = (ratings.users, ratings.items, ratings.values - self._mean, noise, order)
        biases = (user_biases, item_biases, True, learn_items)
        for _ in range(config.epochs):
            descend_factors(*columns, users, items, *rates, *biases)
