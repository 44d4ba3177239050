# SPDX-License-Identifier: Apache-2.0
"""Item means first: one round adds up ratings and counts them, then another strategy does the rest.

    [strategy]
    name = "means-start"
    main = { name = "reptile", server-lr = 1.0 }

The first round makes `item.mean` and `item.count` of the sums of the clients' deviations from the middle of the scale
and of their indicators of rated items. Under differential privacy the sums are a release of their own, phase `means`,
charged to the same ledger; that means are quotients, and which items are rated most, is post-processing.

Where this differs from the paper: PNBM uses exact item means, without accounting for them.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from fedrec import registry
from fedrec.errors import ExperimentError
from fedrec.experiment import Section
from fedrec.neighbourhood.means import means_of
from strategies._first_round import FirstRound, FirstRoundConfig
from strategies.base import Aggregate, CohortStrategy

MEANS = "means"


class MeansStartConfig(FirstRoundConfig):
    """Settings of the start from item means."""

    step: Annotated[Section, registry.STEP] = Section(name="rating-sums")
    """What a client does in the first round."""
    damping: float = Field(default=20.0, ge=0)
    """Number of ratings, each equal to the mean of all, that every item has beside its own."""
    scale: tuple[float, float] = (1.0, 5.0)
    """Lowest and highest rating; public."""


class _Averaging(CohortStrategy):
    """Turns the sums of the clients' ratings into means."""

    config: MeansStartConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        if "item.mean" not in theta or "item.count" not in theta:
            raise ExperimentError(
                "the model has no item means to start from",
                expected="parameters 'item.mean' and 'item.count'",
                got=", ".join(theta),
                fix="set model.name = 'pnbm', or another strategy",
            )
        total, config = aggregate.total(theta), self.config
        sums = np.concatenate([total["item.mean"], total["item.count"]], axis=1)
        means = means_of(sums, float(theta["item.mean"].mean()), config.damping, config.scale)
        return {**theta, "item.mean": means[:, None], "item.count": total["item.count"]}

    def phase(self, round_number: int) -> str:
        return MEANS


class MeansStart(FirstRound):
    """Adds up ratings in the first round, then leaves the rounds to another strategy, see `FirstRound`."""

    Config = MeansStartConfig
    first_phase = MEANS
    first_class = _Averaging
