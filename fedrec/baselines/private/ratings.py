# SPDX-License-Identifier: Apache-2.0
"""Private systems that predict ratings: DPSGD-MF, item means, DPPS-MF, and the neighbourhood models
of PNBM."""

from typing import Self

import numpy as np
from pydantic import Field, model_validator
from scipy.sparse import csr_array

from fedrec import neighbourhood
from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.baselines.neighbours import (
    LearnedSimilarities,
    ScaleConfig,
    SimilarityConfig,
    check_divergence,
    profiles_of,
)
from fedrec.baselines.private.ranking import NoisyReleases
from fedrec.config import Width
from fedrec.errors import ExperimentError
from fedrec.neighbourhood import Bounds, Examples, Gradient, Profiles, Start
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.privacy.statement import Stated, report, schedule_total
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
_DPSGD_MF_CAVEATS = (
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
        unbiased = (np.zeros(ratings.num_users), np.zeros(ratings.num_items), False)
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
        return Stated(epsilon, epsilon, "the value of one rating", _DPSGD_MF_CAVEATS)

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
# under replace-one the cost is that of sqrt(2) S (`fedrec.neighbourhood`). An item's mean
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
        squares = np.square(neighbourhood.scaled(profiles.values, config.scale)) + 1
        norms = np.sqrt(np.bincount(profiles.users, squares, profiles.num_users))
        shares = plan.clip.factors(norms)
        sums = neighbourhood.rating_sums(profiles, config.scale, shares)
        releases = NoisyReleases({"sums": plan}, source_of("reproducible", config.seed), None)
        noisy = releases.release("sums", sums)
        self._means = neighbourhood.means_of(noisy.astype(np.float64), config.damping, config.scale)

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`."""
        centred = profiles_of(known).centred(self._means)
        sums = np.bincount(centred.users, centred.values, centred.num_users)
        deviations = sums / np.maximum(centred.counts + self.config.user_damping, 1e-300)
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

_MOST_RATINGS = 200
"""Tau, the largest number of ratings per user; of more, a random subset is used."""
_POSTERIOR_CAVEATS = (
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


class _PosteriorConfig(ScaleConfig):
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
        return (self.scale[1] - self.scale[0]) ** 2 * _MOST_RATINGS

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
        return neighbourhood.langevin(start, gradient, random, steps=self.steps, **rates)

    def stated(self) -> Stated | None:
        """Stated and exact privacy of a sample under these settings."""
        if self.epsilon is None:
            return None
        exact = self.factor * self.most_error / self.temperature
        return Stated(self.epsilon, exact, "one user", _POSTERIOR_CAVEATS)


# DPPS-MF: one sample of factors from a scaled posterior (Liu, Wang and Smola 2015; a baseline of
# PNBM).
#
#     (U, V) ~ exp(-epsilon / 4B (1/2 sum (r_ui - m_i - u_u . v_i)^2 + lambda/2 (|U|^2 + |V|^2)))
#
# by stochastic gradient Langevin dynamics. V is released, and each user computes its own u from V
# and its own ratings on its device. The validity of the stated epsilon is discussed above and
# returned by `stated`.
#
# Where this differs from the paper: deviations from items' means are factored; predictions are
# clipped inside the density, as B requires; a user's own factors are the ridge regression of its
# ratings on V and not those of the chain, so that new users can be scored; individual budgets of
# users are not implemented.


class DppsMfConfig(_PosteriorConfig):
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
        profiles = profiles.at_most(_MOST_RATINGS, random.random(len(profiles.items)))
        self._means = neighbourhood.item_means(profiles)
        rows = ratings.num_users + ratings.num_items
        start = random.normal(0, _INIT_STD, (rows, config.factors))
        factors = config.sampled(start, self.gradient(profiles), random)
        check_divergence(factors)
        self.items = factors[ratings.num_users :]

    def gradient(self, profiles: Profiles) -> Gradient:
        """Estimates of the gradient of the scaled energy with respect to users' and items' factors,
        stacked."""
        config = self.config
        means = neighbourhood.item_means(profiles)
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


# The private neighbourhood models of PNBM: DPSGD-PNBM and DPPS-PNBM.
#
# DPSGD-PNBM: Laplace noise on the gradients of the similarities, to the letter (PNBM, section 3,
# algorithm 1).
#
#     S <- beta S0;  for t = 1..K, on L ratings drawn uniformly:
#         e_t = 0.5 + (phi - 1) / (t + 1)
#         errors e clamped to +-e_t, denominators at least C, |d_uj - sign(s_ij) f| at most phi
#         G <- sum of gradients + Laplace(dF K gamma / epsilon),    dF = 2 e_t phi / C
#         S <- S - eta (beta G + lambda S)
#
# The stated epsilon is not valid; `stated` gives the exact total of the schedule and the reasons. A
# private system is the federated `pnbm` (`fedrec/models/linear.py`).
#
# Where this differs from the paper: the algorithm is printed as a picture without text; this
# reading is the only one consistent with the surrounding text. The paper assumes the denominator's
# floor C; here it is enforced. Initial similarities, L and K are settings, and `start = "uniform"`
# does not depend on the ratings. The N_k neighbours are selected by the noisy S after training.

_DPSGD_PNBM_CAVEATS = (
    (
        "Amplification by sampling is taken to be linear, and it is not: the exact total above has"
        " the right formula."
    ),
    (
        "That total is right only for neighbours outside the sample left out; here, as in the"
        " paper, all of a user's ratings are neighbours of a sampled one, so that sampling"
        " amplifies nothing."
    ),
    (
        "The noise is scaled to one entry of the gradient. One rating of a user with n ratings"
        " changes up to n (n - 1) entries: at the floor C the sum changes about 1.5 n times as much"
        " as the noise is calibrated for."
    ),
    (
        "Exact item means are used and published, and users with too few ratings are left out based"
        " on the private data."
    ),
    "Tuning K, C and the step size for each epsilon on results is not accounted for.",
)


class DpsgdPnbmConfig(SimilarityConfig):
    """Settings of algorithm 1."""

    start: Start = "uniform"
    """S0."""
    epsilon: float | None = Field(default=1.0, gt=0)
    """Epsilon for one rating, as the paper states it; null: no noise."""
    iterations: int = Field(default=10, ge=1)
    """Number of steps K; 1 to 20 in the paper."""
    sample: float = Field(default=1.0, gt=0, le=1)
    """Gamma = L / |R|, the share of ratings in a step; not in the paper."""
    learning_rate: float = Field(default=0.4, gt=0)
    """Learning rate eta; 0.1 or 0.4 in the paper."""
    rescale: float = Field(default=10.0, gt=0)
    """Beta; 10 or 20 in the paper."""
    floor: float = Field(default=10.0, ge=0)
    """Smallest denominator C; 10 or 15 in the paper; 0 only without noise."""
    minimum_ratings: int = Field(default=20, ge=0)
    """Users with at most this number of ratings do not train."""

    @model_validator(mode="after")
    def _noise_needs_a_floor(self) -> Self:
        if self.epsilon is not None and not self.floor > 0:
            raise ValueError("floor > 0 with an epsilon: noise is scaled to the bounds")
        return self

    @property
    def spread(self) -> float:
        """Width Phi of the rating scale."""
        return self.scale[1] - self.scale[0]


class DpsgdPnbm(LearnedSimilarities):
    """Similarities learned from gradients with Laplace noise."""

    name = "dpsgd-pnbm"
    Config = DpsgdPnbmConfig
    paper = "PNBM, algorithm 1"
    config: DpsgdPnbmConfig

    def selected(self, profiles: Profiles, random: np.random.Generator) -> Profiles:
        """Select the ratings of users with more than `minimum-ratings`.

        Raises:
            ExperimentError: no user has enough ratings.
        """
        selected = profiles.only((profiles.counts > self.config.minimum_ratings)[profiles.users])
        if not len(selected.values):
            raise ExperimentError(
                "no user has enough ratings",
                expected=f"more than {self.config.minimum_ratings} ratings (minimum-ratings)",
                got=f"at most {profiles.counts.max(initial=0)} ratings of a user",
                fix="lower minimum-ratings",
            )
        return selected

    def learned(
        self, start: np.ndarray, profiles: Profiles, random: np.random.Generator
    ) -> np.ndarray:
        """Run algorithm 1."""
        config = self.config
        examples = Examples(profiles, self._means)
        similarity = config.rescale * start
        size = max(1, round(config.sample * len(examples)))
        for step in range(1, config.iterations + 1):
            error = _error_bound(step, config.spread)
            bounds = Bounds(error, config.spread, config.floor, config.prior)
            drawn = random.permutation(len(examples))[:size]
            gradient = examples.gradient(similarity, drawn, bounds)
            if config.epsilon is not None:
                epsilon = config.epsilon / (config.iterations * config.sample)
                noise_scale = sensitivity(step, config.spread, config.floor) / epsilon
                gradient += random.laplace(0.0, noise_scale, gradient.shape)
                np.fill_diagonal(gradient, 0.0)
            similarity *= 1 - config.learning_rate * config.regularisation
            similarity -= config.learning_rate * (config.rescale * gradient)
        return similarity

    def stated(self) -> Stated | None:
        """Stated and exact privacy guarantee after fitting; None without an epsilon."""
        config = self.config
        if config.epsilon is None:
            return None
        total = schedule_total(config.epsilon, config.iterations, config.sample)
        return Stated(config.epsilon, total, "one rating", _DPSGD_PNBM_CAVEATS)


def _error_bound(step: int, spread: float) -> float:
    """Largest error that counts in a step, from 1: `0.5 + (phi - 1) / (t + 1)`, with phi the width
    of the scale."""
    return 0.5 + (spread - 1) / (step + 1)


def sensitivity(step: int, spread: float, floor: float) -> float:
    """Sensitivity Delta F of a step as in the paper: twice the bound on one gradient entry."""
    return 2 * _error_bound(step, spread) * spread / floor


# DPPS-PNBM: one sample of the similarities from a scaled posterior, to the letter (PNBM, section 4,
# algorithm 2).
#
#     S <- S - epsilon / 4B eta_t / 2 (|R| mean gradient of L ratings + lambda S / H) + z
#     z ~ N(0, rho eta_t)
#
# The validity of the stated epsilon is discussed above and returned by `stated`.
#
# Where this differs from the paper:
#
# - B = 16 tau holds only if predictions stay within the scale, so they are clipped inside the
#   density; where they are clipped they have no gradient.
# - H of section 4.2 is 1 to five digits for every pair of items of MovieLens-100K, so that dividing
#   the penalty by it corrects nothing.
# - Start, number of steps and size of a batch are not in the paper; they are settings.


class DppsPnbmConfig(_PosteriorConfig, SimilarityConfig):
    """Settings of algorithm 2."""

    start: Start = "uniform"
    """S before the first step."""
    regularisation: float = Field(default=0.02, ge=0)
    """Lambda; 0.02 or 0.002 in the paper."""


class DppsPnbm(LearnedSimilarities):
    """One posterior sample of the similarities."""

    name = "dpps-pnbm"
    Config = DppsPnbmConfig
    paper = "PNBM, algorithm 2"
    config: DppsPnbmConfig

    def selected(self, profiles: Profiles, random: np.random.Generator) -> Profiles:
        """Select at most 200 ratings of each user."""
        return profiles.at_most(_MOST_RATINGS, random.random(len(profiles.items)))

    def learned(
        self, start: np.ndarray, profiles: Profiles, random: np.random.Generator
    ) -> np.ndarray:
        """Run algorithm 2."""
        similarity = self.config.sampled(start, self.gradient(profiles), random)
        np.fill_diagonal(similarity, 0.0)
        return similarity

    def gradient(self, profiles: Profiles) -> Gradient:
        """Estimates of the gradient of the scaled energy, from batches."""
        config = self.config
        examples = Examples(profiles, neighbourhood.item_means(profiles))
        low, high = config.scale
        bounds = Bounds(prior=config.prior, low=low, high=high)
        penalty = config.regularisation / _inclusion(profiles, config.batch)

        def estimated(similarity: np.ndarray, random: np.random.Generator) -> np.ndarray:
            drawn = random.integers(0, len(examples), config.batch)
            gradient = examples.gradient(similarity, drawn, bounds)
            gradient *= len(examples) / config.batch
            gradient += penalty * similarity
            gradient *= config.factor
            return gradient

        return estimated

    def stated(self) -> Stated | None:
        """Stated and exact privacy guarantee after fitting; None without an epsilon."""
        return self.config.stated()


def _inclusion(profiles: Profiles, batch: int) -> np.ndarray:
    """Inclusion probabilities H_ij of section 4.2, `float64 [items, items]`, for batches of ratings
    drawn with replacement."""
    shares = np.bincount(profiles.items, minlength=profiles.num_items) / max(len(profiles.items), 1)
    absent = shares * (1 - shares) ** (batch - 1)
    return 1 - np.outer(absent, absent)
