# SPDX-License-Identifier: Apache-2.0
"""F-measure of lists: the weighted harmonic mean of precision and recall."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.metrics.base import UserMetric
from fedrec.metrics.ranks import RankedBlock


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    beta: float = Field(default=1.0, gt=0)
    """How many times as much recall counts as precision."""


class Example(UserMetric):
    """(1 + beta^2) hits / (beta^2 relevant + k)."""

    Config = ExampleConfig
    config: ExampleConfig
    name = "f-measure"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`; NaN for a user without a held-out positive."""
        square = self.config.beta**2
        hits = block.hits[:, :k].sum(1)
        return (1 + square) * hits / (square * block.number + k) + block.nothing
