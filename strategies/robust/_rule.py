# SPDX-License-Identifier: Apache-2.0
"""Base of the robust rules: a combination of the clients' updates in place of their mean.

    theta <- theta + server-lr * rule(theta_1 - theta, ..., theta_n - theta)

A rule needs the update of each client and not their sum (`reply = "each"`), so it is refused beside
secure aggregation, which hides them, and beside `[privacy]`: one client may move a median or decide
a choice of Krum, so noise for a sum does not hide it. Every client counts the same.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from fedrec.protocol.sparse_update import Change, SparseUpdate, apply_changes, dense_change
from strategies._server_rate import ServerRate
from strategies.base import Aggregate, CohortStrategy


@dataclass(frozen=True, eq=False)
class ClientChanges:
    """The changes of one parameter by all clients of a round.

    Attributes:
        before: the parameter at the start of the round, not to be changed.
        rows: `int64 [R]`, the rows that any client changed; None: the parameter is no table of
            which clients change few rows.
        values: `float64 [clients, R, ...]`, the changes of these rows, or of all of the parameter.
        touched: `bool [clients, R]`, which rows each client changed; without `rows`, all true.
    """

    before: np.ndarray
    rows: np.ndarray | None
    values: np.ndarray
    touched: np.ndarray

    @classmethod
    def of(cls, changes: Sequence[Change], table: np.ndarray) -> Self:
        """The changes of a parameter, whose value before is `table [...]`."""
        sparse = [one for one in changes if isinstance(one, SparseUpdate) and not one.drift]
        if len(sparse) < len(changes):
            values = np.stack([dense_change(change, table) for change in changes])
            return cls(table, None, values, np.ones(values.shape[:2], dtype=bool))
        rows = np.unique(np.concatenate([change.rows for change in sparse]))
        values = np.zeros((len(sparse), len(rows), *table.shape[1:]))
        touched = np.zeros(values.shape[:2], dtype=bool)
        for place, change in enumerate(sparse):
            own = np.searchsorted(rows, change.rows)
            values[place, own] = change.values
            touched[place, own] = True
        return cls(table, rows, values, touched)

    def change(self, combined: np.ndarray) -> Change:
        """A combination of the values, `[R, ...]`, as a change of the parameter."""
        if self.rows is None:
            return combined
        return SparseUpdate(self.before.shape, self.rows, combined)

    @property
    def flat(self) -> np.ndarray:
        """`float64 [clients, n]`: the values as vectors."""
        return self.values.reshape(len(self.values), -1)


class RobustRule(CohortStrategy):
    """Moves the shared parameters by a robust combination of the clients' updates."""

    Config = ServerRate
    reply = "each"
    sees = "a robust rule, which needs the update of each client"
    instead = (
        "leave out [privacy], or set strategy.name = 'reptile': a clip bounds each client, too"
    )
    config: ServerRate

    @abstractmethod
    def combined(
        self, changes: Mapping[str, ClientChanges], round_number: int
    ) -> dict[str, np.ndarray]:
        """The combination for each parameter, `float64 [R, ...]`, of the rows in `changes`; rounds
        are numbered from 1."""

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next global parameters from the present ones and the updates of at least one
        client."""
        each = aggregate.each
        if each is None:
            return theta
        changes = {
            name: ClientChanges.of(each.changes(name, table), table)
            for name, table in theta.items()
        }
        moved = self.combined(changes, aggregate.round)
        moves = {name: own.change(moved[name]) for name, own in changes.items()}
        return apply_changes(theta, moves, self.config.rate(aggregate.round))


def squared_distances(changes: Mapping[str, ClientChanges]) -> np.ndarray:
    """`float64 [clients, clients]`: squared L2 distances between the clients' whole updates."""
    gram = sum(own.flat @ own.flat.T for own in changes.values())
    norms = np.diag(gram)
    return np.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0.0)


def mean_of(changes: Mapping[str, ClientChanges], chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Mean updates of some clients `int64 [n]`, `[R, ...]` by parameter."""
    return {name: own.values[chosen].mean(axis=0) for name, own in changes.items()}
