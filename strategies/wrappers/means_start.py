# SPDX-License-Identifier: Apache-2.0
"""Item means first: one round adds up ratings and counts them, then another strategy does the rest.

    [strategy]
    name = "means-start"
    main = { name = "reptile", server-lr = 1.0 }

The first round makes `item.mean` and `item.count` of the sums of the clients' ratings, mapped to
[-1, 1], and of their indicators of rated items. Under differential privacy the sums are a release
of their own, phase `means`, charged to the same ledger; that means are quotients, and which items
are rated most, is post-processing.

Where this differs from the paper: PNBM uses exact item means, without accounting for them.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedrec.components import registry
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_settings
from fedrec.neighbourhood.means import means_of
from strategies.base import Aggregate, Cohorts, CohortStrategy
from strategies.wrappers._first_round import FirstRound, FirstRoundConfig

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
        if abs(float(theta["item.mean"].mean()) - sum(config.scale) / 2) > 1e-3:
            raise _other_scale(
                config.scale, f"a model whose means start at {theta['item.mean'].mean():g}"
            )
        means = means_of(sums, config.damping, config.scale)
        return {**theta, "item.mean": means[:, None], "item.count": total["item.count"]}

    def phase(self, round_number: int) -> str:
        return MEANS


class MeansStart(FirstRound):
    """Adds up ratings in the first round, then leaves the rounds to another strategy, see
    `FirstRound`.

    Raises:
        ExperimentError: the step of the first round has another scale of ratings.
    """

    Config = MeansStartConfig
    first_phase = MEANS
    first_class = _Averaging

    def __init__(self, config: MeansStartConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        of_step = getattr(component_settings(registry.STEP, config.step), "scale", config.scale)
        if tuple(of_step) != tuple(config.scale):
            raise _other_scale(config.scale, f"strategy.step.scale = {list(of_step)}")


def _other_scale(scale: tuple[float, float], got: str) -> ExperimentError:
    """Strategy, step and model have to map ratings in the same way."""
    return ExperimentError(
        "ratings are on two scales",
        expected=f"strategy.scale, strategy.step.scale and model.scale alike ({list(scale)})",
        got=got,
        fix="set all three to the lowest and highest rating",
    )
