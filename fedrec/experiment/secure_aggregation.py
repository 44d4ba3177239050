# SPDX-License-Identifier: Apache-2.0
"""The `[secure-aggregation]` table of an experiment; `secure-aggregation = true` is the same
without settings."""

from __future__ import annotations

import math

from pydantic import Field

from fedrec.config import Config


class SecureAggregationConfig(Config):
    """Settings of secure aggregation."""

    threshold: float = Field(default=2 / 3, gt=0.5, le=1)
    """Share of a round's nodes that must remain until its sum is unmasked, and that would have to
    collude with the server to unmask a node; more than half, so that the server cannot send
    different values to two groups of nodes."""
    least_nodes: int = Field(default=2, ge=2)
    """Smallest number of nodes in a sum, independently of the share; with two, each of them can
    subtract its own contribution."""
    largest: float = Field(default=2.0**20, gt=0)
    """Largest absolute value in a node's sum of updates, which determines the fixed-point
    precision. Under differential privacy it follows from the clip norm and the noise, and this
    setting is ignored."""

    def quorum(self, nodes: int) -> int:
        """Number of the given nodes that are needed to unmask a sum; may be larger than their
        number."""
        return max(math.ceil(self.threshold * nodes), nodes // 2 + 1, self.least_nodes)
