# SPDX-License-Identifier: Apache-2.0
"""A graph of users by the similarity of their item embeddings, and means over it (Zhang et al., KDD
2024, equations 6 to 8).

A user's table is the shared one and the user's last change of some of its rows, so that sums over
whole tables come from the changes alone, which have far fewer rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedrec.graphs.native import add_products, weighted_sums
from fedrec.protocol.client_arrays import ItemRequests


@dataclass(frozen=True, eq=False)
class Changes:
    """Rows of item embeddings that users changed, ordered by item, then by user.

    Attributes:
        clients: `int64 [users]`, ascending.
        users: `int64 [n]`, whose row it is, as a place in `clients`.
        items: `int64 [n]`, ascending.
        values: `float32 [n, d]`.
    """

    clients: np.ndarray
    users: np.ndarray
    items: np.ndarray
    values: np.ndarray

    @cached_property
    def changed(self) -> tuple[np.ndarray, np.ndarray]:
        """The items that somebody changed, `int64 [m]`, ascending, and where the rows of each
        begin, `int64 [m + 1]`."""
        items, starts = np.unique(self.items, return_index=True)
        return items, np.append(starts, len(self.items))

    def products(self, places: np.ndarray) -> np.ndarray:
        """Inner products `float64 [places, users]` of some users' changes with everybody's.

        Args:
            places: `int64 [places]`, places in `clients`, distinct.
        """
        found = np.zeros((len(places), len(self.clients)))
        row = np.full(len(self.clients), -1)
        row[places] = np.arange(len(places))
        add_products(self.changed[1], self.users, self.values, row, found)
        return found

    @cached_property
    def squares(self) -> np.ndarray:
        """Squared norms of the changes, `float64 [users]`."""
        return self._per_user(np.einsum("nd,nd->n", self.values, self.values))

    def along(self, start: np.ndarray) -> np.ndarray:
        """Inner products `float64 [users]` of the changes with the shared table `[items, d]`."""
        return self._per_user(np.einsum("nd,nd->n", self.values, start[self.items]))

    def similarities(self, places: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Cosines `float64 [places, users]` between tables; 0 with one that is zero.

        Args:
            places: `int64 [places]`, places in `clients`, distinct.
            start: the shared table `[items, d]`.
        """
        shared = np.square(start, dtype=np.float64).sum()
        along = self.along(start)
        found = self.products(places)
        found += shared + along[places, None] + along
        squares = np.maximum(shared + 2 * along + self.squares, 0)
        norms = np.maximum(np.sqrt(squares), 1e-12)
        return found / norms[places, None] / norms

    def mean(self, weights: np.ndarray, items: int) -> np.ndarray:
        """Sum of the changes by the weights `[users]` of their users, `float64 [items, d]`."""
        return self._sums(np.arange(items), np.zeros(items, np.int64), weights[None])

    def means_of_rows(self, weights: np.ndarray, requests: ItemRequests) -> np.ndarray:
        """Sums of the changes by weights, of the rows that each client needs.

        Args:
            weights: `[requests, users]`.
            requests: whose n items to give.

        Returns:
            `float32 [n, d]`.
        """
        asking = np.repeat(np.arange(len(requests.clients)), np.diff(requests.offsets))
        order = np.argsort(requests.items, kind="stable")
        found = np.empty((len(order), self.values.shape[1]), dtype=np.float32)
        weights = weights.astype(np.float32)
        found[order] = self._sums(requests.items[order], asking[order], weights)
        return found

    def _sums(self, wanted: np.ndarray, asking: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Sums of the changes of items `int64 [n]`, ascending, by the weights `[askers, users]` of
        whoever asks for each, `int64 [n]`; `[n, d]` of the weights' type."""
        items, starts = self.changed
        begins = starts[np.searchsorted(items, wanted)]
        ends = starts[np.searchsorted(items, wanted, side="right")]  # the same for others' items
        found = np.zeros((len(wanted), self.values.shape[1]), dtype=weights.dtype)
        weighted_sums(begins, ends, self.users, self.values, asking, weights, found)
        return found

    def _per_user(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.users, values, minlength=len(self.clients))


def edges(similar: np.ndarray, neighbours: int) -> np.ndarray:
    """Weights `[users, others]` of each user's neighbours, equal ones that sum to 1.

    Args:
        similar: `[users, others]`.
        neighbours: how many each user has: the most similar; of equal ones the first. 0: all whose
            similarity is above the mean of `similar`; the most similar alone where there is none.
    """
    if neighbours:
        count = min(neighbours, similar.shape[1])
        chosen = np.argsort(-similar, axis=1, kind="stable")[:, :count]
        weights = np.zeros_like(similar)
        np.put_along_axis(weights, chosen, np.asarray(1 / count, similar.dtype), axis=1)
        return weights
    above = similar > similar.mean(dtype=np.float64)
    lonely = np.flatnonzero(~above.any(axis=1))
    above[lonely, similar[lonely].argmax(axis=1)] = True
    return (above / above.sum(axis=1, keepdims=True)).astype(similar.dtype)


class Uploads:
    """The last upload of each client: its changes to rows of the item embeddings.

    Args:
        limit: number of clients to remember, the most recent ones; None: all.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._rows: dict[int, np.ndarray] = {}
        self._changes: dict[int, np.ndarray] = {}
        self._together: Changes | None = None

    def remember(self, client: int, rows: np.ndarray, change: np.ndarray) -> None:
        """Replace the change of one client by `float32 [n, d]` of the distinct rows `int64 [n]`."""
        self._together = None
        for memory in (self._rows, self._changes):
            memory.pop(client, None)
        self._rows[client] = rows
        self._changes[client] = change
        if self.limit is not None and len(self._rows) > self.limit:
            oldest = next(iter(self._rows))
            del self._rows[oldest], self._changes[oldest]

    def changes(self) -> Changes | None:
        """All that is remembered; None for nothing."""
        if self._together is None and self._rows:
            clients = sorted(self._rows)
            items = np.concatenate([self._rows[client] for client in clients])
            users = np.repeat(np.arange(len(clients)), [len(self._rows[c]) for c in clients])
            order = np.argsort(items, kind="stable")
            values = np.concatenate([self._changes[client] for client in clients])[order]
            ids = np.array(clients, dtype=np.int64)
            self._together = Changes(ids, users[order], items[order], values)
        return self._together

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
        self._rows = {}
        self._changes = {}
        self._together = None
        if "clients" not in state:
            return
        ends = np.cumsum(state["counts"])[:-1]
        rows = np.split(state["rows"], ends)
        changes = np.split(state["changes"], ends)
        for client, own, change in zip(state["clients"].tolist(), rows, changes, strict=True):
            self._rows[client] = own
            self._changes[client] = change
