# SPDX-License-Identifier: Apache-2.0
"""Early stopping: ends a run when a metric of the evaluated sample has not improved for a number of
rounds."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from fedrec.config import Config
from fedrec.evaluation.metrics import lower_is_better
from fedrec.runs.folder import RunFolder
from server.callbacks.base import Callback


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    metric: str = "hits@10"
    """Column of rounds.csv to observe."""
    patience: int = Field(default=5, ge=1)
    """Evaluations without improvement after which the run ends."""


class Example(Callback):
    """Observes one metric."""

    Config = ExampleConfig

    def __init__(self, config: ExampleConfig) -> None:
        super().__init__(config)
        self.settings = config
        self.best = -math.inf
        self.sign = 1.0
        self.waited = 0

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """Looks up whether higher or lower values are better."""
        lower = lower_is_better(self.settings.metric, run.experiment.evaluation)
        self.sign = -1.0 if lower else 1.0

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """Called after each round; True ends the run."""
        value = row.get(self.settings.metric)
        if value is None:  # this round was not evaluated
            return False
        gain = self.sign * value
        self.waited = 0 if gain > self.best else self.waited + 1
        self.best = max(self.best, gain)
        return self.waited >= self.settings.patience
