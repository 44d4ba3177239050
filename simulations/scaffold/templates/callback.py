# SPDX-License-Identifier: Apache-2.0
"""Early stopping: ends a run when a metric of the evaluated sample has not improved for a number of
rounds."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from fedrec.config import Config
from server.callbacks.base import Callback


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    metric: str = "hits@10"
    """Column of rounds.csv to observe; higher is better."""
    patience: int = Field(default=5, ge=1)
    """Evaluations without improvement after which the run ends."""


class Example(Callback):
    """Observes one metric."""

    Config = ExampleConfig

    def __init__(self, config: ExampleConfig) -> None:
        super().__init__(config)
        self.settings = config
        self.best = -math.inf
        self.waited = 0

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """Called after each round; True ends the run."""
        value = row.get(self.settings.metric)
        if value is None:  # this round was not evaluated
            return False
        self.waited = 0 if value > self.best else self.waited + 1
        self.best = max(self.best, value)
        return self.waited >= self.settings.patience
