# SPDX-License-Identifier: Apache-2.0
"""Private state of a node on disk: arrays of each client, and secrets of secure aggregation.

Secrets of secure aggregation, kept by the node that made them: every message of a session may be
handled by a new process.

One SQLite file per node and run, readable by its owner only; what is deleted is overwritten. A node
has one channel key per run and at most one session, with the states `shared`, `masked`, deleted, in
this order; no session begins twice. Nothing of it is ever logged.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from fedrec.errors import RefusalError
from fedrec.protocol.serialization import PackedArray, opened, packed
from fedrec.protocol.updates import Change, SparseUpdate
from fedrec.runtime.files import MOST_JSON, DatabaseFile, parse_json

# Private arrays of each client, which never leave the node that hosts it.
#
# One SQLite file per node, readable by its owner only. Every entry carries the round that wrote it,
# and a round reads only entries of earlier rounds, so a repeated round starts from the same private
# state. Flower's `Context.state` is not used: it lives in memory only. Of a table most of whose
# rows are zero, such as what a client knows of the few items that it met, only the other rows are
# written.

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
        query = (
            "SELECT (SELECT arrays FROM state WHERE client = value AND round < ?"
            " ORDER BY round DESC LIMIT 1) FROM json_each(?)"
        )
        with self._connect() as connection:
            rows = connection.execute(query, (int(before_round), _listed(clients))).fetchall()
        return [{} if blob is None else _decode(blob, names) for (blob,) in rows]

    def save_all(
        self, arrays: Mapping[int, Mapping[str, Change]], round_number: int, *, keep: int
    ) -> None:
        """Write clients' arrays for a round, in one transaction; entries of that round or later (a
        broken run's) are replaced.

        Args:
            arrays: the private arrays of each client; a `SparseUpdate` is a table of which all
                other rows are zero.
            round_number: the round that produced them.
            keep: number of rounds, up to this one, whose state is kept.
        """
        number = int(round_number)
        clients = _listed(arrays)
        rows = [(int(client), number, _encode(values)) for client, values in arrays.items()]
        these = "client IN (SELECT value FROM json_each(?))"
        with self._connect() as connection:
            connection.execute(f"DELETE FROM state WHERE round >= ? AND {these}", (number, clients))
            connection.executemany("INSERT INTO state VALUES (?, ?, ?)", rows)
            connection.execute(
                f"DELETE FROM state WHERE {these} AND round < (SELECT MAX(round) FROM state AS last"
                " WHERE last.client = state.client AND last.round <= ? - ? + 1)",
                (clients, number, keep),
            )


def _listed(clients: Iterable[int]) -> str:
    return json.dumps(list(map(int, clients)))


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


class SessionSecrets(DatabaseFile):
    """The secrets of one node in one run. No other process can write during a connection."""

    opening = (
        "PRAGMA secure_delete = ON",
        "CREATE TABLE IF NOT EXISTS channel (key BLOB)",
        "CREATE TABLE IF NOT EXISTS session (id BLOB PRIMARY KEY, stage TEXT, secrets TEXT)",
        "CREATE TABLE IF NOT EXISTS begun (id BLOB PRIMARY KEY)",
        "CREATE TABLE IF NOT EXISTS summed"
        " (round INTEGER PRIMARY KEY, clients BLOB, nodes BLOB, survivors BLOB)",
        "BEGIN IMMEDIATE",
    )

    def channel(self, fresh: bytes) -> bytes:
        """The private channel key; if there is none yet, `fresh` is stored as the key."""
        with self._connect() as connection:
            connection.execute(
                "INSERT INTO channel SELECT ? WHERE NOT EXISTS (SELECT * FROM channel)", (fresh,)
            )
            (key,) = connection.execute("SELECT key FROM channel").fetchone()
        return key

    def begin(self, session: bytes, secrets: Mapping[str, bytes]) -> None:
        """Begin a session, whose shares are sent; any other session is deleted.

        Raises:
            ClientError: it was begun before, so its keys have sealed other shares.
        """
        with self._connect() as connection:
            if (
                connection.execute("SELECT * FROM begun WHERE id = ?", (session,)).fetchone()
                is not None
            ):
                raise _taken("a session that no node has seen", "one that was begun before")
            connection.execute("INSERT INTO begun VALUES (?)", (session,))
            connection.execute("DELETE FROM session")
            connection.execute(
                "INSERT INTO session VALUES (?, 'shared', ?)", (session, _text(secrets))
            )

    def look(self, session: bytes) -> dict[str, bytes]:
        """The secrets of a session before its sum is masked.

        Raises:
            ClientError: there is no such session, or a sum was masked in it: the difference of two
                masked sums would have no mask.
        """
        with self._connect() as connection:
            return _one(connection, session, "shared")

    def masked(self, session: bytes, secrets: Mapping[str, bytes]) -> None:
        """Record that a sum was masked in a session, with the secrets that unmasking needs.

        Raises:
            ClientError: see `look`.
        """
        with self._connect() as connection:
            _one(connection, session, "shared")
            connection.execute(
                "UPDATE session SET stage = 'masked', secrets = ?", (_text(secrets),)
            )

    def waiting(self, session: bytes) -> dict[str, bytes]:
        """The secrets of a session after its sum was masked.

        Raises:
            ClientError: there is no such session, or it was unmasked.
        """
        with self._connect() as connection:
            return _one(connection, session, "masked")

    def end(self, session: bytes) -> None:
        """Delete a session that is unmasked.

        Raises:
            ClientError: it was before.
        """
        with self._connect() as connection:
            _one(connection, session, "masked")
            connection.execute("DELETE FROM session")

    def first_sum(self, round_number: int, clients: bytes, group: bytes) -> bool:
        """Whether a sum that is to be masked is the first one of its round, which is recorded, or
        has the same clients.

        Args:
            round_number: the round.
            clients: digest of the node's clients in it.
            group: digest of the nodes of its session.
        """
        with self._connect() as connection:
            row = (round_number, clients, group)
            connection.execute("INSERT OR IGNORE INTO summed VALUES (?, ?, ?, NULL)", row)
            query = "SELECT 1 FROM summed WHERE round = ? AND clients = ?"
            row_found = connection.execute(query, row[:2]).fetchone()
        return row_found is not None

    def same_sum(self, round_number: int, group: bytes, survivors: bytes) -> bool:
        """Whether a sum that is to be unmasked is the first one of its round, whose survivors are
        recorded, or has the same nodes and survivors.

        Args:
            round_number: the round.
            group: see `first_sum`.
            survivors: a byte per node, 1 for those whose numbers are in the sum.
        """
        which = "WHERE round = ? AND nodes = ?"
        with self._connect() as connection:
            row = (survivors, round_number, group)
            unknown = "survivors IS NULL"
            connection.execute(f"UPDATE summed SET survivors = ? {which} AND {unknown}", row)
            query = f"SELECT 1 FROM summed {which} AND survivors = ?"
            row_found = connection.execute(query, (*row[1:], survivors)).fetchone()
        return row_found is not None


def _one(connection: sqlite3.Connection, session: bytes, stage: str) -> dict[str, bytes]:
    query = "SELECT secrets FROM session WHERE id = ? AND stage = ?"
    row = connection.execute(query, (session, stage)).fetchone()
    if row is None:
        raise _taken(
            f"the node's latest session, at the stage {stage!r}; each step once",
            "another session, or a step that was taken before",
        )
    secrets = parse_json(row[0], MOST_JSON)
    return {name: bytes.fromhex(value) for name, value in secrets.items()}


def _text(secrets: Mapping[str, bytes]) -> str:
    return json.dumps({name: value.hex() for name, value in secrets.items()})


def _taken(expected: str, got: str) -> RefusalError:
    return RefusalError(
        "this node does not take that step of secure aggregation",
        expected=expected,
        got=got,
        fix="none; the round continues without this node",
    )
