# SPDX-License-Identifier: Apache-2.0
"""Item means in the first round, by sums and counts of ratings; then another strategy.

    [strategy]
    name = "means-start"
    main = { name = "reptile", server-lr = 1.0 }

The first round computes `item.mean` and `item.count` from the sums of the clients' ratings, mapped
to [-1, 1], and of their indicators of rated items. Under differential privacy the sums are a
release of their own, phase `means`, charged to the same ledger; computing quotients, and selecting
the most rated items, is post-processing.

Where this differs from the paper: PNBM uses exact item means, without accounting for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedrec.components import registry
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_settings
from fedrec.neighbourhood.means import Scale, means_of
from strategies.base import Aggregate, Cohorts, CohortStrategy
from strategies.wrappers._first_round import FirstRound, FirstRoundConfig

MEANS = "means"


class MeansStartConfig(FirstRoundConfig):
    """Settings of the start from item means."""

    step: Annotated[Section, registry.STEP] = Section(name="rating-sums")
    """Step of the clients in the first round."""
    damping: float = Field(default=20.0, ge=0)
    """Smoothing: number of ratings equal to the overall mean that are added to each item."""
    scale: Scale = (1.0, 5.0)
    """Lowest and highest rating; public."""


class _Averaging(CohortStrategy):
    """Computes means from the sums of the clients' ratings."""

    config: MeansStartConfig

    def refuse_misfits(self, theta: Mapping[str, np.ndarray]) -> None:
        if "item.mean" not in theta or "item.count" not in theta:
            raise ExperimentError(
                "the model has no item means",
                expected="parameters 'item.mean' and 'item.count'",
                got=", ".join(theta),
                fix="set model.name = 'pnbm', or another strategy",
            )

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        self.refuse_misfits(theta)  # for loops that do not call it before the first round
        total = aggregate.total(theta)
        config = self.config
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
    """Sums ratings in the first round, then runs another strategy, see `FirstRound`.

    Raises:
        ExperimentError: the step of the first round has another scale of ratings.
    """

    name = "means-start"
    Config = MeansStartConfig
    first_phase = MEANS
    first_class = _Averaging

    def __init__(self, config: MeansStartConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        of_step = getattr(component_settings(registry.STEP, config.step), "scale", config.scale)
        if tuple(of_step) != tuple(config.scale):
            raise _other_scale(config.scale, f"strategy.step.scale = {list(of_step)}")


def _other_scale(scale: tuple[float, float], got: str) -> ExperimentError:
    """Strategy, step and model must have the same rating scale."""
    return ExperimentError(
        "the rating scales differ",
        expected=f"strategy.scale, strategy.step.scale and model.scale alike ({list(scale)})",
        got=got,
        fix="set all three to the lowest and highest rating",
    )
