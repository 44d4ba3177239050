# SPDX-License-Identifier: Apache-2.0
"""A robust rule as a plug-in in one file: the mean without the largest and smallest share of the
clients' updates, coordinate by coordinate (Yin et al. 2018, option II)."""

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.protocol.sparse_update import apply_changes, dense_change
from strategies.base import Aggregate, CohortStrategy


class TrimmedMeanConfig(Config):
    """Settings of the trimmed mean."""

    cut: float = Field(default=0.2, ge=0, lt=0.5)
    """Share of the clients that is left out on each side."""


class TrimmedMean(CohortStrategy):
    """Moves each coordinate by the trimmed mean of the clients' updates."""

    Config = TrimmedMeanConfig
    reply = "each"
    config: TrimmedMeanConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """`theta + trimmed mean`."""
        assert aggregate.each is not None
        changes = {}
        for name, table in theta.items():
            each = [dense_change(change, table) for change in aggregate.each.changes(name, table)]
            out = int(self.config.cut * len(each))
            changes[name] = np.sort(each, axis=0)[out : len(each) - out].mean(axis=0)
        return apply_changes(theta, changes, 1.0)
