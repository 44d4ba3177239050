# SPDX-License-Identifier: Apache-2.0
"""Strategies that delegate each round to one of several others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedrec.components.registry import STRATEGY, resolve
from fedrec.experiment.sections import component_settings
from strategies.base import Aggregate, Cohorts, CohortStrategy


class ByRound(CohortStrategy):
    """Delegates each round to the strategy that `strategy_of` returns."""

    def __init__(self, config: Any, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._round = 1

    @classmethod
    def server_rate(cls, config: Any, round_number: int) -> float:
        """The factor of the main strategy, which runs the later rounds."""
        main: Any = resolve(STRATEGY, config.main.name)
        return main.server_rate(component_settings(STRATEGY, config.main), round_number)

    @abstractmethod
    def strategy_of(self, round_number: int) -> CohortStrategy:
        """The strategy of a round."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of the round's strategy."""
        self._round = server_round
        return self.strategy_of(server_round).configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The aggregate of the round's strategy."""
        return self.strategy_of(server_round).aggregate_train(server_round, replies)

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The parameters after an aggregate, by the strategy of the last configured round."""
        return self.strategy_of(self._round).apply(theta, aggregate)
