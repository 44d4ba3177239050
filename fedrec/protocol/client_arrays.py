# SPDX-License-Identifier: Apache-2.0
"""Arrays of single clients in one message: the parameters that a server generates for each of them,
or the update of each. A client uses few items, so of item tables only the rows that it names or
changes are sent. The rows of all clients of a message are concatenated, without padding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedrec.protocol.updates import Change, SparseUpdate
from fedrec.runtime.ragged import add_prefix, spans, strip_prefix

_VALUE = "value/"
_ROW = "row/"


@dataclass(frozen=True, eq=False)
class ItemRequests:
    """Items whose rows some clients need.

    Attributes:
        clients: `int64 [C]`, ascending.
        offsets: `int64 [C + 1]`; client c needs `items[offsets[c]:offsets[c + 1]]`.
        items: `int64 [P]`, ascending and distinct for each client.
    """

    clients: np.ndarray
    offsets: np.ndarray
    items: np.ndarray

    @classmethod
    def of(cls, clients: np.ndarray, lists: Sequence[np.ndarray]) -> ItemRequests:
        """Make requests from one array of items `int64 [n]` per client, ascending and distinct."""
        offsets = np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int64)
        items = np.concatenate([np.empty(0, dtype=np.int64), *lists])
        return cls(np.asarray(clients, dtype=np.int64), offsets, items.astype(np.int64, copy=False))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return as named arrays."""
        return {"clients": self.clients, "offsets": self.offsets, "items": self.items}

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray]) -> ItemRequests:
        """Read named arrays returned by `arrays`."""
        return cls(arrays["clients"], arrays["offsets"], arrays["items"])

    @classmethod
    def concatenated(cls, parts: Sequence[ItemRequests]) -> ItemRequests:
        """Concatenate the clients of several parts."""
        none = np.empty(0, dtype=np.int64)
        clients = np.concatenate([none, *(part.clients for part in parts)])
        items = np.concatenate([none, *(part.items for part in parts)])
        counts = np.concatenate([none, *(np.diff(part.offsets) for part in parts)])
        return cls(clients, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), items)

    @classmethod
    def joined(cls, parts: Sequence[ItemRequests]) -> ItemRequests:
        """Join several parts; clients are ascending."""
        every = cls.concatenated(parts)
        return every.take(np.argsort(every.clients))

    @property
    def owners(self) -> np.ndarray:
        """Index in `clients` of the client of each item, `int64 [P]`."""
        return np.repeat(np.arange(len(self.clients)), np.diff(self.offsets))

    def rows_of(self, indices: np.ndarray) -> np.ndarray:
        """Indices `int64 [rows]` of the P rows of the clients at the given positions, in their
        order."""
        starts = self.offsets[indices]
        counts = self.offsets[indices + 1] - self.offsets[indices]
        return spans(starts, counts)

    def take(self, indices: np.ndarray) -> ItemRequests:
        """Select the clients at the given positions, `int64 [n]`."""
        counts = self.offsets[indices + 1] - self.offsets[indices]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return ItemRequests(self.clients[indices], offsets, self.items[self.rows_of(indices)])


@dataclass(frozen=True, eq=False)
class ClientArrays:
    """Parameters or updates of some clients.

    Attributes:
        requests: the clients, and the items of `rows`.
        values: `[C, ...]` per parameter, whole tables included.
        rows: `[P, ...]` per item table, for the requested items only.
    """

    requests: ItemRequests
    values: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    @classmethod
    def of(
        cls, requests: ItemRequests, tensors: Mapping[str, Tensor], tables: Collection[str]
    ) -> ClientArrays:
        """Make from tensors: `[P, ...]` for tables with rows per client, `[C, ...]` for other
        parameters."""
        arrays = {name: value.numpy(force=True) for name, value in tensors.items()}
        rows = {name: arrays.pop(name) for name in tables}
        return cls(requests, arrays, rows)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return as named arrays."""
        return {**self.requests.arrays(), **add_prefix({_VALUE: self.values, _ROW: self.rows})}

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray]) -> ClientArrays:
        """Read named arrays returned by `arrays`."""
        return cls(
            ItemRequests.read(arrays), strip_prefix(_VALUE, arrays), strip_prefix(_ROW, arrays)
        )

    def take(self, indices: np.ndarray) -> ClientArrays:
        """Select the clients at the given positions, `int64 [n]`."""
        rows = self.requests.rows_of(indices)
        return ClientArrays(
            self.requests.take(indices),
            {name: value[indices] for name, value in self.values.items()},
            {name: value[rows] for name, value in self.rows.items()},
        )

    def arranged(self, indices: np.ndarray) -> ClientArrays:
        """Select like `take`, at positions `int64 [n]`, but without a copy if these are all clients
        in their order, as within one part."""
        in_order = np.array_equal(indices, np.arange(len(self.requests.clients)))
        return self if in_order else self.take(indices)

    @classmethod
    def joined(cls, parts: Sequence[ClientArrays]) -> ClientArrays:
        """Join several parts; clients are ascending, and missing parameters zero. A table with rows
        in one part and whole values in another becomes rows."""
        tables = {name for part in parts for name in part.rows}
        parts = [part._with_rows(tables & part.values.keys()) for part in parts]
        requests = ItemRequests.concatenated([part.requests for part in parts])
        order = np.argsort(requests.clients)
        counts = [len(part.requests.clients) for part in parts]
        values = _filled([part.values for part in parts], counts)
        rows = _filled([part.rows for part in parts], [len(p.requests.items) for p in parts])
        return cls(requests, values, rows).arranged(order)

    def _with_rows(self, names: Collection[str]) -> ClientArrays:
        """Convert whole tables to rows, so that all tables have rows."""
        if not names:
            return self
        count = len(self.values[next(iter(names))][0])
        clients = self.requests.clients
        requests = ItemRequests.of(clients, [np.arange(count)] * len(clients))
        rows = {name: self.values[name].reshape(-1, *self.values[name].shape[2:]) for name in names}
        values = {name: value for name, value in self.values.items() if name not in names}
        for name, value in self.rows.items():
            dense = np.zeros((len(clients), count, *value.shape[1:]), dtype=value.dtype)
            dense[self.requests.owners, self.requests.items] = value
            rows[name] = dense.reshape(-1, *value.shape[1:])
        return ClientArrays(requests, values, rows)

    def changes(self, name: str, table: np.ndarray) -> list[Change]:
        """Each client's update of one parameter, in the order of the clients; zero for a parameter
        that is not here.

        Args:
            name: the parameter.
            table: its value before, `[...]`, for the shape.
        """
        if name in self.values:
            return list(self.values[name])
        if name not in self.rows:
            return [np.zeros_like(table)] * len(self.requests.clients)
        ends = self.requests.offsets[1:-1]
        pairs = zip(
            np.split(self.requests.items, ends), np.split(self.rows[name], ends), strict=True
        )
        return [SparseUpdate(table.shape, items, rows) for items, rows in pairs]

    def padded(self, width: int) -> dict[str, np.ndarray]:
        """Pad each client's rows to `[C, width, ...]`; all parameters have a leading cohort
        dimension."""
        mask = self.real(width)
        filled = dict(self.values)
        for name, value in self.rows.items():
            filled[name] = np.zeros((*mask.shape, *value.shape[1:]), dtype=value.dtype)
            filled[name][mask] = value
        return filled

    def real(self, width: int) -> np.ndarray:
        """Mask `bool [C, width]` of the rows of `padded` that are not padding."""
        return np.arange(width) < np.diff(self.requests.offsets)[:, None]


def _filled(
    parts: Sequence[Mapping[str, np.ndarray]], counts: Sequence[int]
) -> dict[str, np.ndarray]:
    """Concatenate the arrays of several parts, with zeros `[count, ...]` for missing ones."""
    like = {name: value for part in parts for name, value in part.items()}
    return {
        name: np.concatenate(
            [
                part.get(name, np.zeros((count, *value.shape[1:]), value.dtype))
                for part, count in zip(parts, counts, strict=True)
            ]
        )
        for name, value in like.items()
    }
