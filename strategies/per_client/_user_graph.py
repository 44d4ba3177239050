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

from fedrec.graphs.native import add_products, merge_rows, weighted_sums
from fedrec.protocol.client_arrays import ItemRequests

_SPARE = 8  # one row of free memory for so many rows


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
        return _starts(self.items)

    def products(self, places: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Inner products `float64 [places + 1, users]` of some users' changes, and of the shared
        table, with everybody's changes.

        Args:
            places: `int64 [places]`, places in `clients`, distinct.
            start: the shared table `[items, d]`.
        """
        items, starts = self.changed
        found = np.zeros((len(self.clients), len(places) + 1))
        column = np.full(len(self.clients), -1)
        column[places] = np.arange(len(places))
        shared = start[items].astype(np.float32, copy=False)
        add_products(starts, self.users, self.values, column, shared, found)
        return np.ascontiguousarray(found.T)

    @cached_property
    def squares(self) -> np.ndarray:
        """Squared norms of the changes, `float64 [users]`."""
        squares = np.einsum("nd,nd->n", self.values, self.values)
        return np.bincount(self.users, squares, minlength=len(self.clients))

    def similarities(self, places: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Cosines `float64 [places, users]` between tables; 0 with one that is zero.

        Args:
            places: `int64 [places]`, places in `clients`, distinct.
            start: the shared table `[items, d]`.
        """
        shared = np.square(start, dtype=np.float64).sum()
        products = self.products(places, start)
        along = products[-1]
        found = products[:-1] + (shared + along[places, None] + along)
        squares = np.maximum(shared + 2 * along + self.squares, 0)
        norms = np.maximum(np.sqrt(squares), 1e-12)
        return found / norms[places, None] / norms

    def mean(self, weights: np.ndarray, items: int) -> np.ndarray:
        """Sum of the changes by the weights `[users]` of their users, `float32 [items, d]`."""
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
        found[order] = self._sums(requests.items[order], asking[order], weights)
        return found

    def _sums(self, wanted: np.ndarray, asking: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Sums of the changes of items `int64 [n]`, ascending, by the weights `[askers, users]` of
        whoever asks for each, `int64 [n]`; `float32 [n, d]`."""
        items, asked = _starts(wanted)
        begins, ends = (np.searchsorted(self.items, items, side) for side in ("left", "right"))
        found = np.zeros((len(wanted), self.values.shape[1]), dtype=np.float32)
        weights = weights.astype(np.float32)
        weighted_sums(begins, ends, self.users, self.values, asked, asking, weights, found)
        return found


def _starts(items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ones of ascending items `int64 [n]`, and where each begins, with the end: `int64
    [m]` and `[m + 1]`."""
    found, starts = np.unique(items, return_index=True)
    return found, np.append(starts, len(items))


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

    Attributes:
        changes: all that is remembered; None for nothing. Valid up to the next `remember`.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.changes: Changes | None = None
        self._order = np.empty(0, dtype=np.int64)  # the clients, those heard last at the end
        # The values of the changes, from `_start` on, and free memory before or after them. The
        # system would clear a new array in each round.
        self._table = np.empty((0, 0), dtype=np.float32)
        self._start = 0

    def remember(self, requests: ItemRequests, values: np.ndarray) -> None:
        """Replace the changes of some clients.

        Args:
            requests: the clients in the order of their uploads, and the distinct items of each.
            values: `float32 [P, d]`, the changes of these items' rows.

        Raises:
            ValueError: native code would read beyond the end of an array.
        """
        old = self.changes
        if old is None:
            nothing = np.empty(0, dtype=np.int64)
            old = Changes(nothing, nothing, nothing, values[:0])
        shape = len(requests.items), old.values.shape[1]
        if values.shape != shape:
            raise ValueError(f"Expected changes of shape {shape}, got {values.shape}.")
        before = self._order[~np.isin(self._order, requests.clients)]
        order = np.concatenate([before, requests.clients])
        order = order if self.limit is None else order[-self.limit :]
        new = np.flatnonzero(np.isin(requests.clients, order))
        rows = requests.rows_of(new)
        kept = np.isin(old.clients, np.intersect1d(before, order))
        self._order = order
        self.changes = self._merged(old, kept, requests.take(new), values, rows)

    def _merged(
        self,
        old: Changes,
        kept: np.ndarray,
        requests: ItemRequests,
        values: np.ndarray,
        rows: np.ndarray,
    ) -> Changes:
        """Changes of some clients from before, `bool [clients]`, and of new ones, which are the
        given rows of `float32 [P, d]`, in the memory of the former ones."""
        clients = np.sort(np.concatenate([old.clients[kept], requests.clients]))
        remain = np.flatnonzero(kept[old.users])
        before = np.searchsorted(clients, old.clients)[old.users[remain]]
        new = np.searchsorted(clients, requests.clients).repeat(np.diff(requests.offsets))
        users = np.concatenate([before, new])
        items = np.concatenate([old.items[remain], requests.items])
        # fast, as those from before are in this order already
        order = np.argsort(items * len(clients) + users, kind="stable")
        needed = len(old.values) + len(rows)
        if self.changes is None or len(self._table) < needed:
            size = needed + needed // _SPARE
            self._table = np.empty((size, values.shape[1]), dtype=np.float32)
            self._table[: len(old.values)] = old.values
            self._start = 0
        places = np.concatenate([remain, len(old.values) + rows])[order]
        self._start = merge_rows(self._table, self._start, len(old.values), values, places)
        found = self._table[self._start : self._start + len(order)]
        return Changes(clients, users[order], items[order], found)

    def state(self) -> dict[str, np.ndarray]:
        """The state as named arrays, in the order of the uploads."""
        if self.changes is None:
            return {}
        changes = self.changes
        ranks = np.argsort(self._order)[changes.users]  # whose each row is, in that order
        rows = np.argsort(ranks, kind="stable")  # of each client by item, as they are here
        values = changes.values[rows]
        values.flags.writeable = False  # need not be copied
        return {
            "clients": self._order,
            "counts": np.bincount(ranks, minlength=len(self._order)),
            "rows": changes.items[rows],
            "changes": values,
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self.changes = None
        self._order = self._order[:0]
        if "clients" in state:
            offsets = np.concatenate([[0], np.cumsum(state["counts"])])
            requests = ItemRequests(state["clients"], offsets, state["rows"])
            self.remember(requests, state["changes"])
