# SPDX-License-Identifier: Apache-2.0
"""Canaries: their ids, their uploads, and their directions in a model.

Canary j is client `first + j`. Its direction u_j lies in one row of an item table that belongs to
no item: the j-th of the last k rows, `u_j = (1, ..., 1) / sqrt(d)` there and 0 elsewhere. Different
rows: directions are orthonormal. Rows of no item: no other client's update has a component along
them, and they are never recommended.
"""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.rng import stream


class CanaryPlan(Config):
    """Ids and uploads of the canaries of an audit."""

    first: int = Field(ge=0)
    """Client id of the first canary; the others follow."""
    count: int = Field(ge=4)
    """Number of canaries, k."""
    magnitude: float = Field(gt=0)
    """L2 norm of a canary's upload; above the clip norm S, so that clipping is tested, too."""
    examples: int = Field(default=1000, ge=1)
    """Number of examples that a canary reports; tests that no weight depends on it."""
    seed: int = Field(default=0, ge=0)
    """Seed of the secret signs, stream `"canary-signs"`."""

    def signs(self) -> np.ndarray:
        """`int64 [k]`: secret signs b_j, independent and fair; drawn again in the rare case that
        all are equal."""
        for attempt in range(64):
            signs = 2 * stream(self.seed, "canary-signs", attempt).integers(0, 2, self.count) - 1
            if min((signs > 0).sum(), (signs < 0).sum()) >= 2:
                return signs
        raise ValueError("Expected a random generator that gives both signs.")

    def is_canary(self, clients: np.ndarray) -> np.ndarray:
        """`bool [n]`: which of some clients are canaries."""
        return (clients >= self.first) & (clients < self.first + self.count)

    def upload(self, client: int, rows: int, width: int) -> tuple[int, float]:
        """Row of a canary in a table `[rows, width]`, and the value of every entry of that row in
        its update."""
        place = client - self.first
        return rows - self.count + place, float(self.signs()[place]) * self.magnitude / math.sqrt(
            width
        )

    def project(self, change: np.ndarray) -> np.ndarray:
        """`float64 [k]`: the change of an item table `[rows, d]` along each canary's direction."""
        reserved = change[-self.count :].astype(np.float64)
        return reserved.sum(axis=1) / math.sqrt(change.shape[1])


def reserved_table(item_tables: tuple[str, ...], parameters: dict[str, tuple[int, ...]]) -> str:
    """The item table whose reserved rows the canaries use: the first.

    Args:
        item_tables: names of the model's tables with one row per item.
        parameters: shapes of the parameters.

    Raises:
        ExperimentError: the model has no such table.
    """
    for name in item_tables:
        if name in parameters:
            return name
    raise ExperimentError(
        "this model has no item table for canaries",
        expected="a model with a table of item rows (`item_tables`)",
        got=f"parameters {', '.join(parameters)}",
        fix="audit an experiment with such a model, for example privrec",
    )
