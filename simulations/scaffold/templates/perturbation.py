# SPDX-License-Identifier: Apache-2.0
"""Removes a share of each user's training rows."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.rng import stream


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    share: float = Field(default=0.2, ge=0, lt=1)
    """Share of each user's training rows to remove, rounded down."""


class Example(Perturbation):
    """Suppression: some of a user's rows, chosen at random, never leave the device."""

    Config = ExampleConfig
    config: ExampleConfig

    def perturb(self, data: TrainingData) -> Perturbed:
        """The rows to learn from, and the training row that each of them comes from."""
        kept = []
        for user in range(data.rows.num_users):
            rows = data.rows.rows_of(user)
            random = stream(self.seed, "perturb", user)
            count = len(rows) - int(self.config.share * len(rows))
            kept.append(random.choice(rows, size=count, replace=False))
        origin = np.sort(np.concatenate(kept))
        return Perturbed(
            data.rows.with_rows(origin), origin, {"left out": len(data.rows) - len(origin)}
        )

    def words(self) -> list[str]:
        """Sentences to be reported with the results of a run."""
        return [
            f"{self.config.share:.0%} of each user's rows are removed; the others are unchanged."
        ]
