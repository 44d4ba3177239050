# SPDX-License-Identifier: Apache-2.0
"""Synthetic profiles from a noisy co-occurrence matrix: user-level differential privacy of the
whole table.

Only two Gaussian releases are computed from the data: the number of users of each item, and of each
pair of the most popular items. Everything after is post-processing: each user gets a profile of
items that occur together, drawn without that user's rows. So a profile reveals nothing about its
user beyond the guarantee. A recommender trained on it learns which items occur together, and can be
applied to rows that never leave the device.

Neighbours differ in all rows of one user (replace-one); the set of users is public. Counts are
non-negative, so each of the two releases costs sqrt(2) S and not 2 S (`fedrec.privacy.adjacency`).
"""

import dataclasses
from typing import Any

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.errors import ExperimentError
from fedrec.perturb.disclosure import binary
from fedrec.perturb.synthesis.cooccurrence import noisy_release, profiles
from fedrec.perturb.synthesis.preferences import refuse_missing_rows
from fedrec.privacy.accounting.backend import DEFAULT_BACKEND, BackendName
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import Plan
from fedrec.privacy.question import report
from fedrec.rng import stream


class NoisyCooccurrenceConfig(Config):
    """Settings of the generator from noisy co-occurrences."""

    epsilon: float = Field(gt=0)
    """Epsilon of the whole table, for both releases together, > 0."""
    delta: float = Field(default=1e-5, gt=0, le=0.1)
    """Additive term of the guarantee: any set of outcomes is at most e^epsilon times as probable as
    on neighbouring data, plus delta."""
    items: int = Field(default=500, ge=2)
    """Number of items in the matrix and in the synthetic table, the most popular ones by the noisy
    counts."""
    clip_items: int = Field(default=8, ge=1)
    """Number m of items up to which a user's items have full weight; for n > m items each has
    weight sqrt(m / n), and each pair sqrt(m (m + 1) / (n (n + 1)))."""
    threshold: float = Field(default=2.0, ge=0)
    """Counts below this number of standard deviations of their noise are set to zero."""
    smoothing: float = Field(default=0.7, ge=0, le=1)
    """Share of draws by popularity only, in [0, 1]."""
    backend: BackendName = DEFAULT_BACKEND
    """Accountant."""


class NoisyCooccurrence(Perturbation):
    """Replaces every profile by one drawn from noisy counts of items and pairs of items."""

    name = "noisy-cooccurrence"
    Config = NoisyCooccurrenceConfig
    config: NoisyCooccurrenceConfig

    def plan(self, users: int) -> Plan:
        """Noise and cost of the two releases for a number of users, at a clip norm of 1."""
        config = self.config
        settings = PrivacyConfig(
            clip_norm=1.0, epsilon=config.epsilon, delta=config.delta, backend=config.backend
        )
        return Plan.of(settings, "full", {}, users, rounds=2, contributions="non-negative")

    def perturb(self, data: TrainingData) -> Perturbed:
        """A profile for each user with training rows; no row is derived from one of its own.

        Raises:
            DataError: a user has no training row.
            ExperimentError: the experiment uses ratings, which the synthetic rows do not have.
        """
        refuse_missing_rows(data)
        rows = data.rows
        if data.rated:
            raise ExperimentError(
                "profiles from noisy co-occurrences have no ratings",
                expected="task = 'ranking' without positive-above",
                got="an experiment that learns from ratings",
                fix="choose another perturbation",
            )
        real = np.flatnonzero(np.diff(rows.user_offsets))
        plan = self.plan(len(real))
        release = noisy_release(
            binary(rows)[real],
            plan.noise_scale,
            most_items=self.config.items,
            clip_items=self.config.clip_items,
            threshold=self.config.threshold,
            seed=self.seed,
        )
        random = stream(self.seed, "perturb-profiles")
        users, items = profiles(release, len(real), self.config.smoothing, random)
        found = _table(rows, real[users], release.items[items])
        spent = report(plan)
        figures: dict[str, Any] = {
            "noise multiplier": plan.noise_scale,
            "pairs above the noise": int((release.pairs > 0).sum() // 2),
            "rows of a profile": release.length,
            "epsilon": {
                "whole table, user level": {"epsilon": spent.epsilon, "delta": spent.delta}
            },
        }
        return Perturbed(found, np.full(len(found), -1), figures)

    def words(self) -> list[str]:
        """What is guaranteed."""
        config = self.config
        return [
            (
                f"The synthetic table is ({config.epsilon:g}, {config.delta:g})-differentially"
                " private at user level (replace-one): all rows of a user may be others. Who the"
                " users are is public, and somebody who holds all rows is trusted to add the"
                " noise."
            ),
            (
                "Settings that were tuned on these data are not covered. Random numbers come from"
                " the experiment's seed: a simulation, not a release."
            ),
        ]


def _table(rows: Interactions, users: np.ndarray, items: np.ndarray) -> Interactions:
    """The synthetic rows; ratings and times are not used and zero."""
    ratings = None if rows.ratings is None else np.zeros(len(users), np.float32)
    times = None if rows.times is None else np.zeros(len(users), np.int64)
    return dataclasses.replace(
        rows, users=users, items=items, ratings=ratings, times=times, published_test=None
    )
