# SPDX-License-Identifier: Apache-2.0
"""DPSGD-MF: matrix factorization whose errors get Laplace noise (Berlioz et al. 2015; a baseline of
PNBM).

    for k epochs, for each rating:
        e = r_ui - p_u . q_i + Laplace(k (r_max - r_min) / epsilon), clamped to +-e_max
        p_u += eta (e q_i - lambda p_u);  q_i += eta (e p_u - lambda q_i)

on deviations from noisy averages of items and users, which take a part of epsilon. The scalar e is
the only access to a rating, k times at epsilon / k, so the stated epsilon holds: for the value of
one rating. That a user rated an item stays visible.

Where this differs from the paper: it names several averages and other ways to perturb; here these
are the means of all, of items and of users' deviations, with a third of `average-share` of epsilon
each. e_max is not given and is a setting.
"""

import numpy as np
from pydantic import Field

from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.baselines.neighbourhood._neighbours import ScaleConfig
from fedrec.baselines.neighbourhood.pnbm import refuse_divergence
from fedrec.config import Width
from fedrec.privacy.stated import Stated
from fedrec.rng import stream

_INIT_STD = 0.1  # of the initial factors
_CAVEATS = (
    (
        "It is the value of one rating that is protected. That a user rated an item is not, nor is"
        " a whole user: one with n ratings has n times the epsilon."
    ),
    "Choosing settings anew for each epsilon by looking at results is not accounted for.",
)


class DpsgdMfConfig(ScaleConfig):
    """Settings of matrix factorization under noise."""

    epsilon: float | None = Field(default=1.0, gt=0)
    """Epsilon for the value of one rating; null: no noise."""
    epochs: int = Field(default=10, ge=1)
    """Epochs over the ratings; 10 to 50 in PNBM."""
    factors: Width = 10
    """Number of factors (width of p_u and q_i); 10 to 20 in PNBM."""
    learning_rate: float = Field(default=8e-4, gt=0)
    """Learning rate eta; 6e-4 or 8e-4 in PNBM."""
    regularisation: float = Field(default=0.02, ge=0)
    """Regularisation lambda; 0.02 or 0.2 in PNBM."""
    error_bound: float = Field(default=2.0, gt=0)
    """Bound e_max on the errors."""
    average_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of epsilon for the averages, in (0, 1)."""
    damping: float = Field(default=5.0, ge=0)
    """Smoothing: number of ratings without deviation that are added to each item and user."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial factors, the order of ratings and the noise."""


class DpsgdMf(RatingBaseline):
    """Factors from noisy errors."""

    name = "dpsgd-mf"
    Config = DpsgdMfConfig
    paper = "Berlioz et al. 2015; PNBM, section 5.1"
    config: DpsgdMfConfig

    def fit_ratings(self, ratings: Ratings) -> None:
        """Take noisy averages, then descend.

        Raises:
            ExperimentError: it diverged.
        """
        from fedrec.factors.native import descend_factors

        config = self.config
        random = stream(config.seed, "baseline-dpsgd-mf")
        left = self._averaged(ratings, random)
        self.users = random.normal(0, _INIT_STD, (ratings.num_users, config.factors))
        self.items = random.normal(0, _INIT_STD, (ratings.num_items, config.factors))
        users = ratings.users.astype(np.int64)
        items = ratings.items.astype(np.int64)
        rates = (config.learning_rate, config.regularisation, config.error_bound)
        unbiased = (np.zeros(ratings.num_users), np.zeros(ratings.num_items), False, True)
        for _ in range(config.epochs):
            noise = self._noise(random, len(left), config.epochs / (1 - config.average_share))
            order = random.permutation(len(left))
            steps = (users, items, left, noise, order)
            descend_factors(*steps, self.users, self.items, *rates, *unbiased)
        refuse_divergence(self.users, self.items)

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`. Users must be training users; the known ratings are
        not used."""
        product = np.einsum("nk,nk->n", self.users[users], self.items[items])
        return self.config.within(
            self._mean + self._of_items[items] + self._of_users[users] + product
        )

    def stated(self) -> Stated | None:
        """Its stated and exact privacy after fitting; None without an epsilon."""
        epsilon = self.config.epsilon
        return (
            None
            if epsilon is None
            else Stated(epsilon, epsilon, "the value of one rating", _CAVEATS)
        )

    def _averaged(self, ratings: Ratings, random: np.random.Generator) -> np.ndarray:
        """Set the noisy averages; returns the deviation of each rating from them, `float64
        [ratings]`."""
        share = 3 / self.config.average_share
        total = ratings.values.sum() + self._noise(random, 1, share)[0]
        self._mean = float(np.clip(total / max(len(ratings.values), 1), *self.config.scale))
        left = ratings.values - self._mean
        self._of_items = self._mean_of(left, ratings.items, ratings.num_items, random, share)
        left = left - self._of_items[ratings.items]
        self._of_users = self._mean_of(left, ratings.users, ratings.num_users, random, share)
        return left - self._of_users[ratings.users]

    def _mean_of(
        self,
        values: np.ndarray,
        of: np.ndarray,
        count: int,
        random: np.random.Generator,
        share: float,
    ) -> np.ndarray:
        """Noisy mean deviation by item or user; the number of ratings of each is public."""
        half = (self.config.scale[1] - self.config.scale[0]) / 2
        sums = np.bincount(of, values, count) + self._noise(random, count, share)
        weights = np.bincount(of, minlength=count) + self.config.damping
        return np.clip(sums / np.maximum(weights, 1.0), -half, half)

    def _noise(self, random: np.random.Generator, size: int, shares: float) -> np.ndarray:
        """Laplace noise for a rating that gets epsilon / shares."""
        if self.config.epsilon is None:
            return np.zeros(size)
        width = self.config.scale[1] - self.config.scale[0]
        return random.laplace(0.0, width * shares / self.config.epsilon, size)
