# SPDX-License-Identifier: Apache-2.0
"""Private systems that predict ratings: DPSGD-MF, item means, and DPPS-MF."""

import numpy as np
from pydantic import Field
from scipy.sparse import csr_array

from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.baselines.neighbours import ScaleConfig, profiles_of, user_deviations
from fedrec.baselines.pnbm import check_divergence
from fedrec.config import Width
from fedrec.errors import ExperimentError
from fedrec.neighbourhood.learned import Gradient, langevin, means_of, rating_sums, scaled
from fedrec.neighbourhood.similarity import Profiles, item_means
from fedrec.privacy import mechanisms
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.privacy.statement import Stated, report
from fedrec.rng import source_of, stream
from fedrec.sums.products import descend_factors

# DPSGD-MF: matrix factorization whose errors get Laplace noise (Berlioz et al. 2015; a baseline of
# PNBM).
#
#     for k epochs, for each rating:
#         e = r_ui - p_u . q_i + Laplace(k (r_max - r_min) / epsilon), clamped to +-e_max
#         p_u += eta (e q_i - lambda p_u);  q_i += eta (e p_u - lambda q_i)
#
# on deviations from noisy averages of items and users, which take a part of epsilon. The scalar e
# is the only access to a rating, k times at epsilon / k, so the stated epsilon holds: for the value
# of one rating. That a user rated an item stays visible.
#
# Where this differs from the paper: it names several averages and other ways to perturb; here these
# are the means of all, of items and of users' deviations, with a third of `average-share` of
# epsilon each. e_max is not given.

_INIT_STD = 0.1  # of the initial factors
_MOST_ERROR = 2.0  # e_max
_CAVEATS = (
    (
        "Only the value of one rating is protected, not the fact that a user rated an item, nor a"
        " whole user: a user with n ratings has n times the epsilon."
    ),
    "Tuning the settings for each epsilon on results is not accounted for.",
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
    average_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of epsilon for the averages, in (0, 1)."""
    damping: float = Field(default=5.0, ge=0)
    """Smoothing: number of ratings without deviation that are added to each item and user."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial factors, the order of ratings and the noise."""


class DpsgdMf(RatingBaseline):
    """Matrix factorization from noisy errors."""

    name = "dpsgd-mf"
    Config = DpsgdMfConfig
    paper = "Berlioz et al. 2015; PNBM, section 5.1"
    config: DpsgdMfConfig

    def fit_ratings(self, ratings: Ratings) -> None:
        """Take noisy averages, then descend.

        Raises:
            ExperimentError: it diverged.
        """
        config = self.config
        random = stream(config.seed, "baseline-dpsgd-mf")
        left = self._averaged(ratings, random)
        self.users = random.normal(0, _INIT_STD, (ratings.num_users, config.factors))
        self.items = random.normal(0, _INIT_STD, (ratings.num_items, config.factors))
        users = ratings.users.astype(np.int64)
        items = ratings.items.astype(np.int64)
        rates = (config.learning_rate, config.regularisation, _MOST_ERROR)
        unbiased = (np.zeros(ratings.num_users), np.zeros(ratings.num_items), False, True)
        for _ in range(config.epochs):
            noise = self._noise(random, len(left), config.epochs / (1 - config.average_share))
            order = random.permutation(len(left))
            steps = (users, items, left, noise, order)
            descend_factors(*steps, self.users, self.items, *rates, *unbiased)
        check_divergence(np.concatenate([self.users, self.items]))

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`. Users must be training users; the known ratings are
        not used."""
        product = np.einsum("nk,nk->n", self.users[users], self.items[items])
        return self.config.clipped(
            self._mean + self._of_items[items] + self._of_users[users] + product
        )

    def stated(self) -> Stated | None:
        """Stated and exact privacy guarantee after fitting; None without an epsilon."""
        epsilon = self.config.epsilon
        if epsilon is None:
            return None
        return Stated(epsilon, epsilon, "the value of one rating", _CAVEATS)

    def _averaged(self, ratings: Ratings, random: np.random.Generator) -> np.ndarray:
        """Set the noisy averages; return the deviation of each rating from them, `float64
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
        """Noisy mean deviation by item or user; numbers of ratings are public."""
        half = (self.config.scale[1] - self.config.scale[0]) / 2
        sums = np.bincount(of, values, count) + self._noise(random, count, share)
        weights = np.bincount(of, minlength=count) + self.config.damping
        return np.clip(sums / np.maximum(weights, 1.0), -half, half)

    def _noise(self, random: np.random.Generator, size: int, shares: float) -> np.ndarray:
        """Laplace noise for a rating with a budget of epsilon / shares."""
        if self.config.epsilon is None:
            return np.zeros(size)
        width = self.config.scale[1] - self.config.scale[0]
        return random.laplace(0.0, width * shares / self.config.epsilon, size)


# Item means under user-level differential privacy, plus the user's own mean: the simplest baseline
# for private rating prediction.
#
# There is one release: the ratings of every training user, mapped to [-1, 1], and its indicators of
# rated items form one vector, which is clipped; their sum gets noise once, by the same plan and
# accountant as a federated round. The inner product of any two such vectors is non-negative, so
# under replace-one the cost is that of sqrt(2) S (`fedrec.neighbourhood.learned`). An item's mean
# is its noisy sum over its noisy count. The mean of the user's own deviations, which the device
# knows, is added.


class DpItemMeanConfig(ScaleConfig):
    """Settings of private item means."""

    epsilon: float = Field(default=1.0, gt=0)
    """Epsilon of the release."""
    delta: float = Field(default=1e-5, gt=0, le=0.1)
    """Additive term of the guarantee: any set of outcomes is at most e^epsilon times as probable as
    on neighbouring data, plus delta."""
    clip_norm: float = Field(default=7.5, ge=1e-9)
    """Bound on the L2 norm of a user's ratings in [-1, 1] and indicators together; from sqrt(n) to
    sqrt(2 n), about 1.2 sqrt(n) for n ratings."""
    damping: float = Field(default=20.0, ge=0)
    """Smoothing: number of average ratings that are added to each item."""
    user_damping: float = Field(default=5.0, ge=0)
    """Smoothing: number of ratings without deviation that are added to each user; on the device, at
    no privacy cost."""
    seed: int = Field(default=0, ge=0)
    """Seed of the noise."""


class DpItemMean(RatingBaseline):
    """Noisy item means and users' own means."""

    name = "dp-item-mean"
    Config = DpItemMeanConfig
    config: DpItemMeanConfig

    def plan(self, users: int) -> Plan:
        """Clip, noise and cost of the release for a number of training users."""
        settings = self.config.model_dump(include={"epsilon", "delta", "clip_norm"})
        privacy = PrivacyConfig(**settings, adjacency="replace-one")
        return Plan.of(privacy, "full", {}, users, 1, contributions="non-negative")

    def fit_ratings(self, ratings: Ratings) -> None:
        """Sum the clipped contributions and add noise.

        Raises:
            ExperimentError: there are no training users.
        """
        config = self.config
        profiles = profiles_of(ratings)
        present = int((profiles.counts > 0).sum())
        if not present:
            raise ExperimentError(
                "training users have no ratings",
                fix="choose a dataset with ratings, or a split with training rows",
            )
        plan = self._plan = self.plan(present)
        squares = np.square(scaled(profiles.values, config.scale)) + 1
        norms = np.sqrt(np.bincount(profiles.users, squares, profiles.num_users))
        shares = plan.clip.factors(norms)
        sums = rating_sums(profiles, config.scale, shares)
        drawn = plan.noise_scale, source_of("reproducible", config.seed), 1
        noisy = mechanisms.add_noise(plan.mechanism, {"sums": sums}, *drawn)["sums"]
        self._means = means_of(noisy.astype(np.float64), config.damping, config.scale)

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`."""
        deviations = user_deviations(profiles_of(known), self._means, self.config.user_damping)
        return self.config.clipped(self._means[items] + deviations[users])

    def stated(self) -> Stated | None:
        """Privacy guarantee after fitting, which is that of the plan and valid."""
        spent = report(self._plan)
        return Stated(
            self.config.epsilon, spent.epsilon, f"one user, at delta {spent.delta:g}", spent.caveats
        )


# Shared code of systems that release one sample of a scaled posterior: settings, scale, and the
# actual guarantee.
#
# With each user's half squared error l_u in [0, B / 2], one exact sample of exp(-c sum_u l_u)
# p(parameters) changes, if one user is replaced by another, by a factor of at most exp(c B / 2) in
# the density and by the same factor in its normalisation: it is c B-DP. The papers take c = epsilon
# / 4B, which is four times less than c = epsilon / B.

MOST_RATINGS = 200
"""Tau, the largest number of ratings per user; of more, a random subset is used."""
CAVEATS = (
    (
        "The total is that of an exact sample, which a chain of this length does not reach: at such"
        " step sizes the prior alone takes about 10^10 steps to forget the start. The distance of"
        " the chain from the posterior (delta) is unknown, so nothing is guaranteed."
    ),
    (
        "A temperature below 1 divides the noise: the sample is from the posterior to the power of"
        " 1 / temperature, and epsilon grows by that factor. It is counted above."
    ),
    "Exact item means are used and published.",
    (
        "The epsilon is for a whole user. Divided by the number of ratings it is not a guarantee"
        " for one rating, which has the same epsilon as the user."
    ),
)


class PosteriorConfig(ScaleConfig):
    """Settings of one sample by stochastic gradient Langevin dynamics."""

    epsilon: float | None = Field(default=20.0, gt=0)
    """Epsilon per user, as the paper states it; null: the unscaled posterior."""
    steps: int = Field(default=200, ge=0)
    """Number of steps of the chain; not in the paper."""
    batch: int = Field(default=10_000, ge=1)
    """L, ratings in a step, drawn with replacement; not in the paper."""
    learning_rate: float = Field(default=8e-6, gt=0)
    """Eta_1; 8e-8 to 8e-6 in the paper."""
    decay: float = Field(default=0.3, ge=0, le=1)
    """Xi, of the step sizes; 0.3 in the paper."""
    temperature: float = Field(default=0.09, gt=0)
    """Rho, factor on the variance of the noise; 0.001 to 0.09 in the paper, 1 samples the
    posterior."""
    regularisation: float = Field(default=0.02, ge=0)
    """Lambda, precision of the prior / precision of ratings."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial values, the removed ratings, the batches and the noise."""

    @property
    def most_error(self) -> float:
        """Largest sum B of squared errors of a user."""
        return (self.scale[1] - self.scale[0]) ** 2 * MOST_RATINGS

    @property
    def factor(self) -> float:
        """Factor on the log of the posterior."""
        return 1.0 if self.epsilon is None else self.epsilon / (4 * self.most_error)

    def sampled(
        self, start: np.ndarray, gradient: Gradient, random: np.random.Generator
    ) -> np.ndarray:
        """Last point of a Langevin chain with these settings, `float64 [...]` in the shape of the
        start."""
        rates = {"rate": self.learning_rate, "decay": self.decay, "temperature": self.temperature}
        return langevin(start, gradient, random, steps=self.steps, **rates)

    def stated(self, *more: str) -> Stated | None:
        """Stated and exact privacy of a sample under these settings, with additional caveats."""
        if self.epsilon is None:
            return None
        exact = self.factor * self.most_error / self.temperature
        return Stated(self.epsilon, exact, "one user", (*more, *CAVEATS))


# DPPS-MF: one sample of factors from a scaled posterior (Liu, Wang and Smola 2015; a baseline of
# PNBM).
#
#     (U, V) ~ exp(-epsilon / 4B (1/2 sum (r_ui - m_i - u_u . v_i)^2 + lambda/2 (|U|^2 + |V|^2)))
#
# by stochastic gradient Langevin dynamics. V is released, and each user computes its own u from V
# and its own ratings on its device. The validity of the stated epsilon is discussed in
# `fedrec/baselines/private/ratings.py` and returned by `stated`.
#
# Where this differs from the paper: deviations from items' means are factored; predictions are
# clipped inside the density, as B requires; a user's own factors are the ridge regression of its
# ratings on V and not those of the chain, so that new users can be scored; individual budgets of
# users are not implemented.


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
        profiles = profiles.at_most(MOST_RATINGS, random.random(len(profiles.items)))
        self._means = item_means(profiles)
        rows = ratings.num_users + ratings.num_items
        start = random.normal(0, _INIT_STD, (rows, config.factors))
        factors = config.sampled(start, self.gradient(profiles), random)
        check_divergence(factors)
        self.items = factors[ratings.num_users :]

    def gradient(self, profiles: Profiles) -> Gradient:
        """Estimates of the gradient of the scaled energy with respect to users' and items' factors,
        stacked."""
        config = self.config
        means = item_means(profiles)
        raters = profiles.users
        count = profiles.num_users
        shape = (profiles.num_users, profiles.num_items)

        def estimated(point: np.ndarray, random: np.random.Generator) -> np.ndarray:
            drawn = random.integers(0, len(raters), config.batch)
            users = raters[drawn]
            items = profiles.items[drawn]
            guess = means[items] + np.einsum("nk,nk->n", point[users], point[count + items])
            errors = guess - profiles.values[drawn]
            errors[(guess < config.scale[0]) | (guess > config.scale[1])] = 0.0
            weights = errors * (len(raters) / config.batch)
            matrix = csr_array((weights, (users, items)), shape=shape)
            gradient = np.concatenate([matrix @ point[count:], matrix.T @ point[:count]])
            gradient += config.regularisation * point
            gradient *= config.factor
            return gradient

        return estimated

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`. Users' factors are found from their known
        ratings."""
        centred = profiles_of(known).centred(self._means)
        factors = np.zeros((centred.num_users, self.config.factors))
        penalty = self.config.own_regularisation * np.eye(self.config.factors)
        for user in np.unique(users).tolist():
            rated = slice(centred.offsets[user], centred.offsets[user + 1])
            design = self.items[centred.items[rated]]
            target = design.T @ centred.values[rated]
            factors[user] = np.linalg.solve(design.T @ design + penalty, target)
        product = np.einsum("nk,nk->n", factors[users], self.items[items])
        return self.config.clipped(self._means[items] + product)

    def stated(self) -> Stated | None:
        """Stated and exact privacy guarantee after fitting; None without an epsilon."""
        return self.config.stated()
