# SPDX-License-Identifier: Apache-2.0
"""Mean of the cohort's updates, with momentum on the server (FedAvgM, Hsu et al. 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from fedrec.config import Config
from strategies.base import Aggregate, Cohorts, CohortStrategy


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    server_lr: float = Field(default=1.0, gt=0)
    """How far the shared parameters move along the momentum."""
    momentum: float = Field(default=0.5, ge=0, lt=1)
    """Momentum factor, in [0, 1)."""


class Example(CohortStrategy):
    """Moves the shared parameters along a running mean of the cohorts' updates."""

    Config = ExampleConfig
    config: ExampleConfig

    def __init__(
        self,
        config: ExampleConfig,
        cohorts: Cohorts,
        step: dict[str, Any],
    ) -> None:
        super().__init__(config, cohorts, step)
        self._speed: dict[str, np.ndarray] = {}

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next parameters. Only the sum is used, so the strategy may run under differential
        privacy."""
        moved = {}
        for name, total in aggregate.total(theta).items():
            speed = self.config.momentum * self._speed.get(name, 0.0) + total / aggregate.clients
            self._speed[name] = speed
            moved[name] = theta[name] + self.config.server_lr * speed
        return moved

    def state(self) -> dict[str, np.ndarray]:
        """State that is saved with each checkpoint, for resumed runs."""
        return dict(self._speed)

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._speed = dict(state)
