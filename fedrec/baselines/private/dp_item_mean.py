# SPDX-License-Identifier: Apache-2.0
"""Item means under user-level differential privacy, plus the user's own mean: the simplest baseline
for private rating prediction.

There is one release: the ratings of every training user, mapped to [-1, 1], and its indicators of
rated items form one vector, which is clipped; their sum gets noise once, by the same plan and
accountant as a federated round. The inner product of any two such vectors is non-negative, so under
replace-one the cost is that of sqrt(2) S (`fedrec.neighbourhood.means`). An item's mean is its
noisy sum over its noisy count. The mean of the user's own deviations, which the device knows, is
added.
"""

import numpy as np
from pydantic import Field

from fedrec.baselines.base import RatingBaseline, Ratings
from fedrec.baselines.neighbourhood._neighbours import ScaleConfig, profiles_of, user_deviations
from fedrec.errors import ExperimentError
from fedrec.neighbourhood.means import means_of, rating_sums, scaled
from fedrec.neighbourhood.profiles import Profiles
from fedrec.privacy.accounting.backend import DEFAULT_BACKEND, BackendName
from fedrec.privacy.adjacency import Adjacency
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.noise_source import source_of
from fedrec.privacy.plan import Plan
from fedrec.privacy.question import report
from fedrec.privacy.stated import Stated
from fedrec.rng import stream


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
    most_ratings: int | None = Field(default=None, ge=1)
    """Largest number of ratings per user before clipping; of more, a random subset is kept;
    default: all."""
    adjacency: Adjacency = "replace-one"
    """Neighbours: one user's data replaced by another's, or one user added or removed."""
    backend: BackendName = DEFAULT_BACKEND
    """Accountant."""
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
        """Clip, noise and cost of the release for so many training users."""
        own = self.config.model_dump(
            include={"epsilon", "delta", "clip_norm", "adjacency", "backend"}
        )
        return Plan.of(PrivacyConfig(**own), "full", {}, users, 1, contributions="non-negative")

    def fit_ratings(self, ratings: Ratings) -> None:
        """Sum the clipped contributions and add noise.

        Raises:
            ExperimentError: there are no training users.
        """
        config = self.config
        profiles = profiles_of(ratings)
        if config.most_ratings is not None:
            profiles = profiles.at_most(config.most_ratings, self._keys(profiles))
        present = int((profiles.counts > 0).sum())
        if not present:
            raise ExperimentError(
                "there are no users to learn from",
                expected="ratings",
                got="none",
                fix="choose a dataset with ratings, or a split with training rows",
            )
        plan = self._plan = self.plan(present)
        squares = np.square(scaled(profiles.values, config.scale)) + 1
        norms = np.sqrt(np.bincount(profiles.users, squares, profiles.num_users))
        shares = plan.clip.factors(norms)
        sums = rating_sums(profiles, config.scale, shares)
        noisy = plan.mechanism.add_noise(
            {"sums": sums}, plan.noise_scale, source_of("reproducible", config.seed), 1
        )["sums"]
        self._means = means_of(noisy.astype(np.float64), config.damping, config.scale)

    def _keys(self, profiles: Profiles) -> np.ndarray:
        """Random keys of the ratings; each user's from a stream of its own, or one user's number of
        ratings would change the selection of others."""
        keys = np.zeros(len(profiles.items))
        for user in np.flatnonzero(profiles.counts > (self.config.most_ratings or 0)):
            own = slice(profiles.offsets[user], profiles.offsets[user + 1])
            random = stream(self.config.seed, "baseline-dp-item-mean", int(user))
            keys[own] = random.random(own.stop - own.start)
        return keys

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`."""
        own = user_deviations(profiles_of(known), self._means, self.config.user_damping)
        return self.config.within(self._means[items] + own[users])

    def stated(self) -> Stated | None:
        """Its privacy guarantee after fitting, which is that of the plan and valid."""
        spent = report(self._plan)
        return Stated(
            self.config.epsilon, spent.epsilon, f"one user, at delta {spent.delta:g}", spent.caveats
        )
