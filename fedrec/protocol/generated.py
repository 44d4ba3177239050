# SPDX-License-Identifier: Apache-2.0
"""Parameters that a server generates for each client, and the clients' item requests. A client uses
few items, so only the rows of item tables that it names are generated and sent. The rows of all
clients of a message are concatenated, without padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedrec.prefixes import add_prefix, strip_prefix

_VALUE = "value/"
_ROW = "row/"


@dataclass(frozen=True, eq=False)
class ItemRequests:
    """The items whose rows some clients need.

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
        """From one array of items `int64 [n]` per client, ascending and distinct."""
        offsets = np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int64)
        items = np.concatenate([np.empty(0, dtype=np.int64), *lists])
        return cls(np.asarray(clients, dtype=np.int64), offsets, items.astype(np.int64, copy=False))

    def arrays(self) -> dict[str, np.ndarray]:
        """As named arrays."""
        return {"clients": self.clients, "offsets": self.offsets, "items": self.items}

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray]) -> ItemRequests:
        """From named arrays returned by `arrays`."""
        return cls(arrays["clients"], arrays["offsets"], arrays["items"])

    @classmethod
    def joined(cls, parts: Sequence[ItemRequests]) -> ItemRequests:
        """The clients of several parts, ascending."""
        clients = np.concatenate([np.empty(0, dtype=np.int64), *(part.clients for part in parts)])
        items = np.concatenate([np.empty(0, dtype=np.int64), *(part.items for part in parts)])
        counts = np.concatenate(
            [np.empty(0, dtype=np.int64), *(np.diff(part.offsets) for part in parts)]
        )
        return cls(clients, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), items).take(
            np.argsort(clients)
        )

    def rows_of(self, places: np.ndarray) -> np.ndarray:
        """`int64 [rows]`: which of the P rows belong to the clients at the given positions, in
        their order."""
        starts = self.offsets[places]
        counts = self.offsets[places + 1] - self.offsets[places]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(starts, counts) + within

    def take(self, places: np.ndarray) -> ItemRequests:
        """The clients at the given positions, `int64 [n]`."""
        counts = self.offsets[places + 1] - self.offsets[places]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return ItemRequests(self.clients[places], offsets, self.items[self.rows_of(places)])


@dataclass(frozen=True, eq=False)
class Generated:
    """Generated parameters of some clients, or the gradients of these.

    Attributes:
        requests: the clients, and the items that `rows` are of.
        values: `[C, ...]` per parameter, whole tables included.
        rows: `[P, ...]` per item table, of the requested items only.
    """

    requests: ItemRequests
    values: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    def arrays(self) -> dict[str, np.ndarray]:
        """As named arrays."""
        return {**self.requests.arrays(), **add_prefix({_VALUE: self.values, _ROW: self.rows})}

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray]) -> Generated:
        """From named arrays returned by `arrays`."""
        return cls(
            ItemRequests.read(arrays), strip_prefix(_VALUE, arrays), strip_prefix(_ROW, arrays)
        )

    def take(self, places: np.ndarray) -> Generated:
        """The clients at the given positions, `int64 [n]`."""
        rows = self.requests.rows_of(places)
        return Generated(
            self.requests.take(places),
            {name: value[places] for name, value in self.values.items()},
            {name: value[rows] for name, value in self.rows.items()},
        )

    def padded(self, width: int) -> dict[str, np.ndarray]:
        """All parameters with a leading cohort dimension, the rows of each client filled up to
        `[C, width, ...]`."""
        real = self.real(width)
        found = dict(self.values)
        for name, value in self.rows.items():
            found[name] = np.zeros((*real.shape, *value.shape[1:]), dtype=value.dtype)
            found[name][real] = value
        return found

    def real(self, width: int) -> np.ndarray:
        """`bool [C, width]`: which rows of `padded` are not padding."""
        return np.arange(width) < np.diff(self.requests.offsets)[:, None]
