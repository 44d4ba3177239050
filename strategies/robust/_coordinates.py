# SPDX-License-Identifier: Apache-2.0
"""Base of robust rules that combine each coordinate alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from strategies._server_rate import ServerRate
from strategies.robust._rule import ClientChanges, RobustRule


class CoordinateRuleConfig(ServerRate):
    """Settings of rules that combine each coordinate alone."""

    over: Literal["cohort", "touching"] = "cohort"
    """Whose values a row of an item table is combined from: of the whole cohort, in which clients
    that have not changed the row count as zeros, or of the clients that changed it. Few clients
    change a row, so over the cohort most rows stay as they are; over those that change it, a few
    malicious clients are the majority for a rare item."""
    least: int = Field(default=3, ge=1)
    """With `touching`: number of clients that must have changed a row for it to move."""


class CoordinateRule(RobustRule):
    """Combines each coordinate alone."""

    Config = CoordinateRuleConfig
    config: CoordinateRuleConfig

    @abstractmethod
    def of_sorted(self, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The combination of values `[clients, R, ...]`, ascending, NaN behind the `counts`
        `int64 [R, ...]` that there are."""

    def combined(
        self, changes: Mapping[str, ClientChanges], round_number: int
    ) -> dict[str, np.ndarray]:
        """The combination for each parameter, `float64 [R, ...]`."""
        return {name: self._combined(own) for name, own in changes.items()}

    def _combined(self, own: ClientChanges) -> np.ndarray:
        clients = len(own.values)
        if own.rows is None or self.config.over == "cohort":
            counts = np.full(own.values.shape[1:], clients)
            return self.of_sorted(np.sort(own.values, axis=0), counts)
        tail = (1,) * (own.values.ndim - 2)
        touched = own.touched.reshape(*own.touched.shape, *tail)
        values = np.sort(np.where(touched, own.values, np.nan), axis=0)
        enough = own.touched.sum(axis=0) >= self.config.least
        counts = np.broadcast_to(touched.sum(axis=0), own.values.shape[1:])
        found = np.zeros(own.values.shape[1:])
        found[enough] = self.of_sorted(values[:, enough], counts[enough])
        return found
