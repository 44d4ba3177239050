# SPDX-License-Identifier: Apache-2.0
"""Coordinate-wise median of the clients' updates (Yin et al. 2018, Byzantine-Robust Distributed
Learning, option I).

    theta <- theta + server-lr * median over the cohort of (theta_k - theta), per coordinate

A median needs each client's update and not their sum, so every client gets a message of its own. It
is not a sum: one client may move it, so there is no noise that hides one client, and differential
privacy is refused.

Where this differs from the paper: a recommender's client touches few rows of the item tables, so
over the whole cohort the median of nearly every item's row is zero and nothing is learned about
items. `over = "touching"` therefore takes, row by row, the median over those clients that touched
the row, and moves a row only when at least `least` of them did: with fewer there is no majority to
trust. `over = "cohort"` is the paper's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from pydantic import Field

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.protocol.messages import pack_train, unpack_sum
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import Change, SparseUpdate, dense_change
from fedrec.protocol.zero_copy import to_record, zero_copy_arrays
from strategies.base import Aggregate, CohortStrategy
from strategies.dp import DpFedAvg


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
    config: CoordinateMedianConfig

    def protect(self, privacy: DpFedAvg) -> None:
        """Always refused.

        Raises:
            ExperimentError: a median is no sum.
        """
        raise ExperimentError(
            "strategy 'coordinate-median' cannot be made private",
            expected="a strategy that uses nothing but the sum of the clients' updates",
            got=(
                "a median, which one client may move by more than any clip norm bounds after"
                " aggregation"
            ),
            fix="set strategy.name = 'reptile', or leave the [privacy] table out",
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per client of the cohort; the parameters are shared between them."""
        self._theta = zero_copy_arrays(arrays)
        for node, clients in self.cohorts.by_node(self.cohorts.sample(server_round)):
            for client in clients:
                order = TrainOrder(server_round, np.array([client]), "uniform", self.step)
                yield Message(pack_train(arrays, order), node, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Apply the medians; without any client the parameters stay."""
        updates = [unpack_sum(reply.content) for reply in replies if not reply.has_error()]
        examples = sum(update.examples for update in updates)
        metrics = MetricRecord({"num-clients": len(updates), "num-examples": examples})
        losses = [update.loss for update in updates if update.losses]
        if losses:
            metrics["loss"] = float(np.mean(losses))
        if not updates:
            return None, metrics
        changes = {
            name: self.median([u.total[name] for u in updates], value)
            for name, value in self._theta.items()
        }
        theta = self.apply(self._theta, Aggregate(changes, 1, 1, server_round))
        return to_record(theta), metrics

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """`theta + server-lr * median`."""
        return aggregate.added_to(theta, self.config.server_lr)

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
