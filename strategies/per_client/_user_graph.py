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
        rows: `int64 [n]`, where it is in `values`.
        values: `float32 [rows, d]`.
    """

    clients: np.ndarray
    users: np.ndarray
    items: np.ndarray
    rows: np.ndarray
    values: np.ndarray

    @cached_property
    def changed(self) -> tuple[np.ndarray, np.ndarray]:
        """The items that somebody changed, `int64 [m]`, ascending, and where the rows of each
        begin, `int64 [m + 1]`."""
        items, starts = np.unique(self.items, return_index=True)
        return items, np.append(starts, len(self.items))

    def similarities(self, places: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Cosines `float64 [places, users]` between tables; 0 with one that is zero.

        Args:
            places: `int64 [places]`, places in `clients`, distinct.
            start: the shared table `[items, d]`.
        """
        items, starts = self.changed
        row = np.full(len(self.clients), -1)
        row[places] = np.arange(len(places))
        products = np.zeros((len(places) + 2, len(self.clients)))
        table = start[items].astype(np.float32)
        add_products(starts, self.users, self.rows, self.values, row, table, products)
        along = products[-2]  # with the shared table
        shared = np.square(start, dtype=np.float64).sum()
        found = products[:-2] + (shared + along[places, None] + along)
        squares = np.maximum(shared + 2 * along + products[-1], 0)
        norms = np.maximum(np.sqrt(squares), 1e-12)
        return found / norms[places, None] / norms

    def mean(self, weights: np.ndarray, items: int) -> np.ndarray:
        """Sum of the changes by the weights `[users]` of their users, `float64 [items, d]`."""
        weights = weights.astype(np.float32)[None]
        return self._sums(np.arange(items), np.zeros(items, np.int64), weights).astype(np.float64)

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
        """Sums of the changes of items `int64 [n]`, ascending, by the weights `float32 [askers,
        users]` of whoever asks for each, `int64 [n]`; `float32 [n, d]`."""
        items, starts = self.changed
        begins = starts[np.searchsorted(items, wanted)]
        ends = starts[np.searchsorted(items, wanted, side="right")]  # the same for others' items
        found = np.zeros((len(wanted), self.values.shape[1]), dtype=np.float32)
        weighted_sums(begins, ends, self.users, self.rows, self.values, asking, weights, found)
        return found


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

    All are rows of one array, in which those that were replaced stay until it is full.

    Args:
        limit: number of clients to remember, the most recent ones; None: all.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._forget()

    def remember(self, client: int, rows: np.ndarray, change: np.ndarray) -> None:
        """Replace the change of one client by `float32 [n, d]` of the distinct rows `int64 [n]`."""
        self._together = None
        self._spans.pop(client, None)
        if self.limit is not None and len(self._spans) >= self.limit:
            del self._spans[next(iter(self._spans))]
        self._reserve(len(rows), change.shape[1])
        end = self._used + len(rows)
        self._items[self._used : end] = rows
        self._values[self._used : end] = change
        self._spans[client] = (self._used, len(rows))
        self._used = end

    def changes(self) -> Changes | None:
        """All that is remembered; None for nothing."""
        if self._together is None and self._spans:
            clients = np.array(sorted(self._spans), dtype=np.int64)
            rows = self._rows_of(clients.tolist())
            counts = [self._spans[client][1] for client in clients.tolist()]
            items = self._items[rows]
            order = np.argsort(items, kind="stable")
            users = np.repeat(np.arange(len(clients)), counts)[order]
            self._together = Changes(clients, users, items[order], rows[order], self._values)
        return self._together

    def state(self) -> dict[str, np.ndarray]:
        """The state as named arrays, in the order of the uploads."""
        if not self._spans:
            return {}
        rows = self._rows_of(list(self._spans))
        return {
            "clients": np.array(list(self._spans), dtype=np.int64),
            "counts": np.array([count for _, count in self._spans.values()], dtype=np.int64),
            "rows": self._items[rows],
            "changes": self._values[rows],
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._forget()
        if "clients" not in state:
            return
        self._items = state["rows"]
        self._values = state["changes"]
        self._used = len(self._items)
        starts = np.cumsum(state["counts"]) - state["counts"]
        spans = zip(starts.tolist(), state["counts"].tolist(), strict=True)
        self._spans = dict(zip(state["clients"].tolist(), spans, strict=True))

    def _forget(self) -> None:
        self._items = np.empty(0, np.int64)
        self._values = np.empty((0, 0), np.float32)
        self._used = 0
        self._spans: dict[int, tuple[int, int]] = {}
        self._together: Changes | None = None

    def _rows_of(self, clients: list[int]) -> np.ndarray:
        """The places of some clients' rows, `int64 [n]`, client by client."""
        spans = (self._spans[client] for client in clients)
        rows = [np.arange(start, start + count) for start, count in spans]
        return np.concatenate([np.empty(0, np.int64), *rows])

    def _reserve(self, count: int, width: int) -> None:
        """Make room for so many rows more. The rows are copied, as those who have the array of
        before may still read it; without those that were replaced."""
        if self._used + count <= len(self._items) and self._values.shape[1] == width:
            return
        self.restore(self.state())
        room = 2 * (self._used + count)
        items = np.empty(room, np.int64)
        values = np.empty((room, width), np.float32)
        if self._used:
            items[: self._used] = self._items
            values[: self._used] = self._values
        self._items = items
        self._values = values
