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
    """Share of a round's nodes that must last until its sum is unmasked, and that would have to
    collude with the server to unmask one of them; more than half, so that no two groups of nodes
    can be given different values."""
    least_nodes: int = Field(default=2, ge=2)
    """Nodes that a sum must have, whatever the share says; with two, each of them can take its own
    part off the sum."""
    largest: float = Field(default=2.0**20, gt=0)
    """Largest absolute value in a node's sum of updates; the step of the fixed point is as fine as
    it leaves room for. Under differential privacy it follows from the clip norm and the noise, and
    this is not looked at."""

    def quorum(self, nodes: int) -> int:
        """Number of nodes, of so many, that are needed to unmask a sum; may be more than there
        are."""
        return max(math.ceil(self.threshold * nodes), nodes // 2 + 1, self.least_nodes)
