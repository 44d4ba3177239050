# SPDX-License-Identifier: Apache-2.0
"""Private arrays of each client, which never leave the node that hosts it.

One SQLite file per node, readable by its owner only. Every entry carries the round that wrote it,
and a round reads only entries of earlier rounds, so a repeated round starts from the same private
state. Flower's `Context.state` is not used: it lives in memory only. Of a table most of whose rows
are zero, such as what a client knows of the few items that it met, only the other rows are written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from fedrec.protocol.serialization import PackedArray, opened, packed
from fedrec.protocol.sparse_update import Change, SparseUpdate
from fedrec.runtime.database_file import DatabaseFile

_ROWS = "rows"  # format of a table of which only rows that are not zero are written


class PrivateState(DatabaseFile):
    """Private arrays, keyed by client and round."""

    opening = (
        # of a new file, before its first table; the state of a client may be a table of items, and
        # pages of 4 KiB are read and written one by one
        "PRAGMA page_size = 65536",
        "CREATE TABLE IF NOT EXISTS state "
        "(client INTEGER, round INTEGER, arrays BLOB, PRIMARY KEY (client, round))",
    )

    def load(self, client: int, before_round: int) -> dict[str, np.ndarray]:
        """The newest arrays of a client written before a round; empty when there are none."""
        return self.load_all([client], before_round)[0]

    def load_all(
        self, clients: Sequence[int], before_round: int, names: Collection[str] | None = None
    ) -> list[dict[str, np.ndarray]]:
        """The same for several clients, of the arrays with these names; None: of all."""
        if self.file is not None and not self.file.exists():
            return [{} for _ in clients]
        found = []
        with self._connect() as connection:
            for client in clients:
                row = connection.execute(
                    "SELECT arrays FROM state WHERE client = ? AND round < ? ORDER BY round DESC"
                    " LIMIT 1",
                    (int(client), int(before_round)),
                ).fetchone()
                found.append(_decode(row[0], names) if row else {})
        return found

    def save(
        self, client: int, round_number: int, arrays: Mapping[str, Change], *, keep: int
    ) -> None:
        """Write a client's arrays for a round; entries of that round or later (a broken run's) are
        replaced.

        Args:
            client: the client's id.
            round_number: the round that produced the arrays.
            arrays: the private arrays; a `SparseUpdate` is a table of which all other rows are
                zero.
            keep: number of rounds, up to this one, whose state is kept.
        """
        self.save_all({client: arrays}, round_number, keep=keep)

    def save_all(
        self, arrays: Mapping[int, Mapping[str, Change]], round_number: int, *, keep: int
    ) -> None:
        """The same for several clients, in one transaction."""
        with self._connect() as connection:
            for client, own in arrays.items():
                key = (int(client), int(round_number))
                connection.execute("DELETE FROM state WHERE client = ? AND round >= ?", key)
                connection.execute("INSERT INTO state VALUES (?, ?, ?)", (*key, _encode(own)))
                connection.execute(
                    "DELETE FROM state WHERE client = ? AND round < "
                    "(SELECT MAX(round) FROM state WHERE client = ? AND round <= ? - ? + 1)",
                    (int(client), int(client), int(round_number), keep),
                )


def _encode(arrays: Mapping[str, Change]) -> bytes:
    return packed(
        _rows(name, value) if isinstance(value, SparseUpdate) else _part(name, np.asarray(value))
        for name, value in arrays.items()
    )


def _part(name: str, value: np.ndarray) -> PackedArray:
    filled = np.flatnonzero(value.any(axis=1)) if value.ndim == 2 else None
    if filled is None or 2 * len(filled) > len(value):
        return PackedArray(name, value.dtype.str, value.shape, "raw", value.tobytes())
    return _rows(name, SparseUpdate(value.shape, filled, value[filled]))


def _rows(name: str, table: SparseUpdate) -> PackedArray:
    data = table.rows.astype(np.int64, copy=False).tobytes() + table.values.tobytes()
    return PackedArray(name, table.values.dtype.str, table.shape, _ROWS, data)


def _decode(blob: bytes, names: Collection[str] | None) -> dict[str, np.ndarray]:
    return {part.name: _array(part) for part in opened(blob) if names is None or part.name in names}


def _array(part: PackedArray) -> np.ndarray:
    if part.stype != _ROWS:
        return np.frombuffer(part.data, part.dtype).reshape(part.shape).copy()
    whole = np.zeros(part.shape, part.dtype)
    count = len(part.data) // (8 + part.shape[1] * whole.itemsize)
    rows = np.frombuffer(part.data, np.int64, count)
    whole[rows] = np.frombuffer(part.data, part.dtype, offset=8 * count).reshape(
        count, part.shape[1]
    )
    return whole
