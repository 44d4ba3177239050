# SPDX-License-Identifier: Apache-2.0
"""A graph of users by the similarity of their item embeddings, and means over it (Zhang et al., KDD
2024, equations 6 to 8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np


def similarities(tables: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Cosines `float32 [users, others]` between flattened tables `[users, f]` and `[others, f]`;
    0 with a table that is zero."""
    units = [
        table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
        for table in (tables, others)
    ]
    return units[0] @ units[1].T


def edges(similar: np.ndarray, neighbours: int, threshold: float) -> np.ndarray:
    """Weights `float32 [users, others]` of each user's neighbours, equal ones that sum to 1.

    Args:
        similar: `[users, others]`.
        neighbours: how many each user has: the most similar; of equal ones the first. 0: all whose
            similarity is above the mean of `similar` times the threshold; the most similar alone
            where there is none.
        threshold: see `neighbours`.
    """
    if neighbours:
        count = min(neighbours, similar.shape[1])
        chosen = np.argsort(-similar, axis=1, kind="stable")[:, :count]
        weights = np.zeros_like(similar)
        np.put_along_axis(weights, chosen, np.float32(1 / count), axis=1)
        return weights
    above = similar > threshold * similar.mean(dtype=np.float64)
    lonely = np.flatnonzero(~above.any(axis=1))
    above[lonely, similar[lonely].argmax(axis=1)] = True
    return (above / above.sum(axis=1, keepdims=True)).astype(similar.dtype)


def propagated(
    first: np.ndarray, between: np.ndarray, tables: np.ndarray, layers: int
) -> np.ndarray:
    """Means over the graph, `[users, f]`: `first between^(layers - 1) tables`.

    Args:
        first: weights `[users, others]`.
        between: weights `[others, others]`; not used with one layer.
        tables: `[others, f]`.
        layers: how often means are taken.
    """
    for _ in range(layers - 1):
        first = first @ between
    return first @ tables


class Uploads:
    """The last upload of each client: its changes to rows of the item embeddings.

    Args:
        limit: number of clients to remember, the most recent ones; None: all.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._rows: dict[int, np.ndarray] = {}
        self._changes: dict[int, np.ndarray] = {}

    def remember(self, client: int, rows: np.ndarray, change: np.ndarray) -> None:
        """Replace the change of one client by `float32 [n, d]` of the rows `int64 [n]`."""
        for memory in (self._rows, self._changes):
            memory.pop(client, None)
        self._rows[client], self._changes[client] = rows, change
        if self.limit is not None and len(self._rows) > self.limit:
            oldest = next(iter(self._rows))
            del self._rows[oldest], self._changes[oldest]

    @property
    def clients(self) -> np.ndarray:
        """`int64 [clients]`, ascending: the remembered clients."""
        return np.array(sorted(self._rows), dtype=np.int64)

    def tables(self, clients: Iterable[int], start: np.ndarray) -> np.ndarray:
        """Whole flattened tables `float32 [clients, items * d]`: `start` `[items, d]` plus each
        client's change."""
        clients = list(clients)
        found = np.repeat(start[None].astype(np.float32), len(clients), axis=0)
        for place, client in enumerate(clients):
            found[place, self._rows[client]] += self._changes[client]
        return found.reshape(len(clients), -1)

    def state(self) -> dict[str, np.ndarray]:
        """The state as named arrays, in the order of the uploads."""
        if not self._rows:
            return {}
        counts = [len(rows) for rows in self._rows.values()]
        return {
            "clients": np.array(list(self._rows), dtype=np.int64),
            "counts": np.array(counts, dtype=np.int64),
            "rows": np.concatenate(list(self._rows.values())),
            "changes": np.concatenate(list(self._changes.values())),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._rows, self._changes = {}, {}
        if "clients" not in state:
            return
        ends = np.cumsum(state["counts"])[:-1]
        rows, changes = np.split(state["rows"], ends), np.split(state["changes"], ends)
        for client, own, change in zip(state["clients"].tolist(), rows, changes, strict=True):
            self._rows[client], self._changes[client] = own, change
