# SPDX-License-Identifier: Apache-2.0
"""Geometric median of the clients' updates (RFA, Pillutla, Kakade and Harchaoui 2022), by smoothed
Weiszfeld iterations.

    theta <- theta + server-lr * argmin_v sum over the cohort of |v - (theta_k - theta)|

Unlike a median of each coordinate it is of whole updates, so rows that few clients change move,
too. It needs each client's update and not their sum, which `reply = "each"` asks for; differential
privacy and secure aggregation are refused.

Where this differs from the paper: there the server sees only weighted means, one secure sum for
each iteration, and clients count by their examples; here each counts the same.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.protocol.updates import apply_changes, dense_change
from strategies.base import Aggregate, CohortStrategy


class GeometricMedianConfig(Config):
    """Settings of the geometric median."""

    server_lr: float = Field(default=1.0, gt=0)
    """How far the shared parameters move along the median."""
    iterations: int = Field(default=8, ge=1)
    """Weiszfeld iterations; 1 is the mean."""
    smoothing: float = Field(default=1e-6, gt=0)
    """Smallest distance from an update that is divided by."""


class GeometricMedian(CohortStrategy):
    """Moves the shared parameters along the geometric median of the clients' updates."""

    Config = GeometricMedianConfig
    paper = "Pillutla, Kakade and Harchaoui 2022"
    reply = "each"
    config: GeometricMedianConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """`theta + server-lr * median`."""
        each = aggregate.each
        if each is None:
            return theta
        updates = {
            name: np.stack([dense_change(own) for own in each.updates.changes(name, table)])
            for name, table in theta.items()
        }
        return apply_changes(theta, self.median(updates), self.config.server_lr)

    def median(self, updates: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The geometric median, `[...]` by parameter, of `updates [clients, ...]`."""
        clients = len(next(iter(updates.values())))
        weights = np.ones(clients)
        centre: dict[str, np.ndarray] = {}
        for _ in range(self.config.iterations):
            centre = {
                name: np.tensordot(weights / weights.sum(), own, axes=1)
                for name, own in updates.items()
            }
            squares = [
                np.square(own - centre[name]).reshape(clients, -1).sum(axis=1)
                for name, own in updates.items()
            ]
            weights = 1 / np.maximum(np.sqrt(np.sum(squares, axis=0)), self.config.smoothing)
        return centre
