# SPDX-License-Identifier: Apache-2.0
"""Coordinate-wise median of the clients' updates (Yin et al. 2018, Byzantine-Robust Distributed
Learning, option I).

    theta <- theta + server-lr * median over the cohort of (theta_k - theta), per coordinate

A median needs each client's update and not their sum, which `reply = "each"` asks for. It is not a
sum: one client may move it, so there is no noise that hides one client, and differential privacy
and secure aggregation are refused.

Where this differs from the paper: a recommender's client touches few rows of the item tables, so
over the whole cohort the median of nearly every item's row is zero and nothing is learned about
items. `over = "touching"` therefore takes, row by row, the median over those clients that touched
the row, and moves a row only when at least `least` of them did: with fewer there is no majority to
trust. `over = "cohort"` is the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.protocol.sparse_update import Change, SparseUpdate, apply_changes, dense_change
from strategies.base import Aggregate, CohortStrategy


class CoordinateMedianConfig(Config):
    """Settings of the coordinate-wise median."""

    server_lr: float = Field(default=1.0, gt=0)
    """How far the shared parameters move along the median."""
    over: Literal["touching", "cohort"] = "touching"
    """Whose median a row of an item table takes: of the clients that touched it, or of the whole
    cohort."""
    least: int = Field(default=3, ge=1)
    """With `touching`: clients that must have touched a row for it to move."""


class CoordinateMedian(CohortStrategy):
    """Moves each coordinate by the median of the clients' updates."""

    Config = CoordinateMedianConfig
    paper = "Yin et al. 2018, option I"
    reply = "each"
    config: CoordinateMedianConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """`theta + server-lr * median`."""
        each = aggregate.each
        if each is None:
            return theta
        medians = {
            name: self.median(each.changes(name, table), table) for name, table in theta.items()
        }
        return apply_changes(theta, medians, self.config.server_lr)

    def median(self, changes: Sequence[Change], table: np.ndarray) -> Change:
        """The median of one parameter's changes, coordinate by coordinate."""
        rows = [
            change for change in changes if isinstance(change, SparseUpdate) and not change.drift
        ]
        if len(rows) < len(changes):
            return np.median([dense_change(change, table) for change in changes], axis=0)
        touched = np.unique(np.concatenate([change.rows for change in rows]))
        values = np.full(
            (len(rows), len(touched), *table.shape[1:]), np.nan if self._by_row else 0.0
        )
        for own, change in zip(values, rows, strict=True):
            own[np.searchsorted(touched, change.rows)] = change.values
        if not self._by_row:
            return SparseUpdate(table.shape, touched, np.median(values, axis=0))
        enough = (~np.isnan(values[..., 0])).sum(axis=0) >= self.config.least
        return SparseUpdate(table.shape, touched[enough], np.nanmedian(values[:, enough], axis=0))

    @property
    def _by_row(self) -> bool:
        return self.config.over == "touching"
