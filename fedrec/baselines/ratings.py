# SPDX-License-Identifier: Apache-2.0
"""Systems that predict ratings: matrix factorization by two methods, and item means."""

import numpy as np
from pydantic import Field

from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.config import Config, Width
from fedrec.rng import stream
from fedrec.sums.products import descend_factors

# Biased matrix factorization by stochastic gradient descent (Funk 2006; Koren et al. 2009), which
# libraries call SVD.
#
#     r_ui = mu + b_u + b_i + p_u . q_i
#
# One step after the other, for each rating, users ascending and each one's ratings in the order of
# the data, the same in every epoch: with the error e, b += rate (e - lambda b) and p += rate (e q -
# lambda p), and likewise for the item. Order and defaults are those of Surprise.
#
# Predictions are clipped to the range of the training ratings.

_INIT_STD = 0.1  # of the factors, as in Surprise
_EPOCHS = 20  # over the ratings, likewise


class SvdConfig(Config):
    """Settings of biased matrix factorization by gradient descent."""

    factors: Width = 100
    """Number of factors (width of p_u and q_i)."""
    learning_rate: float = Field(default=0.005, gt=0)
    """Learning rate."""
    regularisation: float = Field(default=0.02, ge=0)
    """Regularisation lambda."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial factors."""


class Svd(RatingBaseline):
    """Biased matrix factorization by stochastic gradient descent on single ratings."""

    name = "svd"
    Config = SvdConfig
    paper = "Funk 2006; Koren et al. 2009"
    config: SvdConfig

    def fit_ratings(self, ratings: Ratings) -> None:
        """Train from fresh factors."""
        config = self.config
        random = stream(config.seed, "baseline-svd")
        self._users, self._items = (
            random.normal(0, _INIT_STD, (number, config.factors))
            for number in (ratings.num_users, ratings.num_items)
        )
        values = ratings.values if len(ratings.values) else np.zeros(1)
        self._mean = float(values.mean())
        self._range = (float(values.min()), float(values.max()))
        self._user_biases = np.zeros(ratings.num_users)
        self._item_biases = np.zeros(ratings.num_items)
        rates = (config.learning_rate, config.regularisation, np.inf)
        order = np.argsort(ratings.users, kind="stable")
        columns = (ratings.users, ratings.items, ratings.values - self._mean, np.zeros(len(order)))
        biases = (self._user_biases, self._item_biases, True)
        for _ in range(_EPOCHS):
            descend_factors(*columns, order, self._users, self._items, *rates, *biases)
        self._users[np.bincount(ratings.users, minlength=ratings.num_users) == 0] = 0.0
        self._items[np.bincount(ratings.items, minlength=ratings.num_items) == 0] = 0.0

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`; without factors and bias of users who had no
        training ratings. The known ratings are not used."""
        product = np.einsum("nk,nk->n", self._users[users], self._items[items])
        biased = self._mean + self._user_biases[users] + self._item_biases[items]
        return (biased + product).clip(*self._range)


# Biased matrix factorization by alternating least squares (Koren, Bell and Volinsky 2009, equations
# 4 and 5).
#
#     r_ui = mu + b_u + b_i + p_u . q_i
#     loss = squared error + lambda (n_u (|p_u|^2 + b_u^2) + n_i (|q_i|^2 + b_i^2))
#
# Given the items, each user's (b_u, p_u) is the solution of a ridge regression on its own ratings,
# and the other way round. The penalty of a user or item counts once per rating of it (Zhou et al.
# 2008), which needs less care in choosing lambda. A new user is solved for from its known ratings
# in the same way.
#
# Where this differs from the paper: it names stochastic gradient descent and alternating least
# squares; this is the latter, and biases are solved for together with the factors.

_SWEEPS = 15  # over users and items


class BiasedMfConfig(Config):
    """Settings of biased matrix factorization."""

    factors: Width = 20
    """Number of factors (width of p_u and q_i)."""
    regularisation: float = Field(default=0.1, gt=0)
    """Regularisation lambda per rating, > 0; about 0.05 to 0.15 for MovieLens."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial item factors."""


class BiasedMf(RatingBaseline):
    """Biased matrix factorization by alternating least squares."""

    name = "biased-mf"
    Config = BiasedMfConfig
    paper = "Koren et al. 2009, eq. 4-5"
    config: BiasedMfConfig

    def fit_ratings(self, ratings: Ratings) -> None:
        """Solve for users and items alternately."""
        width = self.config.factors
        self._mean = float(ratings.values.mean()) if len(ratings.values) else 0.0
        # Columns: bias, factors. The item biases are zero in the first sweep.
        self._items = np.zeros((ratings.num_items, 1 + width))
        self._items[:, 1:] = stream(self.config.seed, "baseline-biased-mf").normal(
            0, 0.1, (ratings.num_items, width)
        )
        num_users = ratings.num_users
        for _ in range(_SWEEPS):
            users = self._solved(
                ratings.users, num_users, ratings.items, ratings.values, self._items
            )
            self._items = self._solved(
                ratings.items, ratings.num_items, ratings.users, ratings.values, users
            )

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`. Users are solved for from their known ratings."""
        factors = self._solved(known.users, known.num_users, known.items, known.values, self._items)
        product = np.einsum("nk,nk->n", factors[users, 1:], self._items[items, 1:])
        return self._mean + factors[users, 0] + self._items[items, 0] + product

    def _solved(
        self,
        rows: np.ndarray,
        number: int,
        others: np.ndarray,
        values: np.ndarray,
        fixed: np.ndarray,
    ) -> np.ndarray:
        """Solve for bias and factors of each user (or item) given the other side; zero without
        ratings.

        Args:
            rows: `int64 [ratings]`, the user (or item) of each rating.
            number: number of users (or items).
            others: `int64 [ratings]`, the other side of each rating.
            values: `float64 [ratings]`.
            fixed: `float64 [others, 1 + factors]`, biases and factors of the other side.
        """
        order = np.argsort(rows, kind="stable")
        design = fixed[others[order]]
        target = values[order] - self._mean - design[:, 0]
        design[:, 0] = 1.0
        counts = np.bincount(rows, minlength=number)
        ends = np.cumsum(counts)
        penalties = np.where(counts, self.config.regularisation * counts, 1.0)
        grams = penalties[:, None, None] * np.eye(fixed.shape[1])
        sums = np.zeros((number, fixed.shape[1], 1))
        for row in np.flatnonzero(counts):
            ratings = slice(ends[row] - counts[row], ends[row])
            inputs = design[ratings]
            grams[row] += inputs.T @ inputs
            sums[row, :, 0] = inputs.T @ target[ratings]
        return np.linalg.solve(grams, sums)[..., 0]


# Item mean: every user's rating of an item is the mean of the training ratings of that item.
#
# The simplest baseline of rating predictors.


class ItemMean(RatingBaseline):
    """Mean rating of each item; the global mean for items without ratings."""

    name = "item-mean"

    def fit_ratings(self, ratings: Ratings) -> None:
        """Compute the means."""
        mean = float(ratings.values.mean()) if len(ratings.values) else 0.0
        counts = np.bincount(ratings.items, minlength=ratings.num_items)
        sums = np.bincount(ratings.items, ratings.values, ratings.num_items)
        self._means = np.divide(
            sums, counts, out=np.full(ratings.num_items, mean), where=counts > 0
        )

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`. The known ratings are not used."""
        return self._means[items]
