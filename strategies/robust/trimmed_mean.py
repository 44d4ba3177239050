# SPDX-License-Identifier: Apache-2.0
"""Coordinate-wise trimmed mean of the clients' updates (Yin et al. 2018, option II): the mean
without the largest and the smallest values of each coordinate.

Where this differs from the paper: `over = "touching"` takes the mean of a row of an item table over
the clients that changed it.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from strategies.robust._coordinates import CoordinateRule, CoordinateRuleConfig


class TrimmedMeanConfig(CoordinateRuleConfig):
    """Settings of the trimmed mean."""

    cut: float = Field(default=0.1, ge=0, lt=0.5)
    """Share of the values of a coordinate that is left out on each side, rounded down."""


class TrimmedMean(CoordinateRule):
    """Moves each coordinate by the trimmed mean of the clients' updates."""

    name = "trimmed-mean"
    Config = TrimmedMeanConfig
    paper = "Yin, Chen, Ramchandran and Bartlett 2018, option II"
    config: TrimmedMeanConfig

    def of_sorted(self, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The means of the middle values, `[R, ...]`, of `values [clients, R, ...]`."""
        out = (self.config.cut * counts).astype(np.int64)
        places = np.arange(len(values)).reshape(-1, *[1] * counts.ndim)
        kept = (places >= out) & (places < counts - out)
        return np.where(kept, values, 0.0).sum(axis=0) / kept.sum(axis=0)
