# SPDX-License-Identifier: Apache-2.0
"""DPPS-MF: one sample of factors from a scaled posterior (Liu, Wang and Smola 2015; a baseline of
PNBM).

    (U, V) ~ exp(-epsilon / 4B (1/2 sum (r_ui - m_i - u_u . v_i)^2 + lambda/2 (|U|^2 + |V|^2)))

by stochastic gradient Langevin dynamics. V is released, and each user computes its own u from V and
its own ratings on its device. The validity of the stated epsilon is discussed in
`fedrec/baselines/private/_posterior.py` and returned by `stated`.

Where this differs from the paper: deviations from items' means are factored; predictions are
clipped inside the density, as B requires; a user's own factors are the ridge regression of its
ratings on V and not those of the chain, so that new users can be scored; individual budgets of
users are not implemented.
"""

import numpy as np
from pydantic import Field
from scipy.sparse import csr_array

from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.baselines.neighbourhood._neighbours import profiles_of
from fedrec.baselines.neighbourhood.pnbm import refuse_divergence
from fedrec.baselines.private._posterior import PosteriorConfig
from fedrec.config import Width
from fedrec.neighbourhood.langevin import Gradient
from fedrec.neighbourhood.profiles import Profiles, item_means
from fedrec.privacy.stated import Stated
from fedrec.rng import stream

_INIT_STD = 0.1  # of the initial factors of the chain


class DppsMfConfig(PosteriorConfig):
    """Settings of a posterior sample of factors."""

    factors: Width = 10
    """Number of factors (width of u and v); 10 to 20 in PNBM."""
    temperature: float = Field(default=0.03, gt=0)
    """Rho, factor on the variance of the noise; 1e-4 to 3e-2 in PNBM, 1 samples the posterior."""
    own_regularisation: float = Field(default=5.0, gt=0)
    """Regularisation of the users' own factors."""


class DppsMf(RatingBaseline):
    """One posterior sample of the items' factors."""

    name = "dpps-mf"
    Config = DppsMfConfig
    paper = "Liu, Wang and Smola 2015; PNBM, section 5.1"
    config: DppsMfConfig

    def fit_ratings(self, ratings: Ratings) -> None:
        """Run the chain.

        Raises:
            ExperimentError: it diverged.
        """
        config = self.config
        random = stream(config.seed, "baseline-dpps-mf")
        profiles = profiles_of(ratings)
        profiles = profiles.at_most(config.most_ratings, random.random(len(profiles.items)))
        self._means, _ = item_means(profiles)
        rows = ratings.num_users + ratings.num_items
        start = random.normal(0, _INIT_STD, (rows, config.factors))
        found = config.chain().sample(start, self.gradient(profiles), random)
        refuse_divergence(found)
        self.items = found[ratings.num_users :]

    def gradient(self, profiles: Profiles) -> Gradient:
        """Estimates of the gradient of the scaled energy with respect to users' and items' factors,
        stacked."""
        config = self.config
        (means, _) = item_means(profiles)
        users = profiles.users
        count = profiles.num_users
        shape = (profiles.num_users, profiles.num_items)

        def estimated(point: np.ndarray, random: np.random.Generator) -> np.ndarray:
            drawn = random.integers(0, len(users), config.batch)
            own = users[drawn]
            rated = profiles.items[drawn]
            guess = means[rated] + np.einsum("nk,nk->n", point[own], point[count + rated])
            errors = guess - profiles.values[drawn]
            errors[(guess < config.scale[0]) | (guess > config.scale[1])] = 0.0
            matrix = csr_array((errors * (len(users) / config.batch), (own, rated)), shape=shape)
            found = np.concatenate([matrix @ point[count:], matrix.T @ point[:count]])
            found += config.regularisation * point
            found *= config.factor
            return found

        return estimated

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`. Users' factors are found from their known
        ratings."""
        own = profiles_of(known).centred(self._means)
        factors = np.zeros((own.num_users, self.config.factors))
        penalty = self.config.own_regularisation * np.eye(self.config.factors)
        for user in np.unique(users).tolist():
            rated = slice(own.offsets[user], own.offsets[user + 1])
            design = self.items[own.items[rated]]
            factors[user] = np.linalg.solve(
                design.T @ design + penalty, design.T @ own.values[rated]
            )
        return self.config.within(
            self._means[items] + np.einsum("nk,nk->n", factors[users], self.items[items])
        )

    def stated(self) -> Stated | None:
        """Its stated and exact privacy after fitting; None without an epsilon."""
        return self.config.stated()
