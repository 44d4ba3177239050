# SPDX-License-Identifier: Apache-2.0
"""Private state of a node on disk: arrays of each client, and secrets of secure aggregation.

Secrets of secure aggregation, kept by the node that made them: every message of a session may be
handled by a new process.

One SQLite file per node and run, readable by its owner only; deleted secrets are overwritten. A
node has one channel key per run and at most one session, with the states `shared`, `masked`,
deleted, in this order; no session begins twice. Nothing of it is ever logged.
"""

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedrec.errors import RefusalError
from fedrec.protocol.updates import SparseUpdate
from fedrec.runtime.files import MOST_JSON, DatabaseFile, parse_json

# Private arrays of each client, which never leave the node that hosts it.
#
# One SQLite file per node, readable by its owner only. Every entry carries the round that wrote it,
# and a round reads only entries of earlier rounds, so a repeated round starts from the same private
# state. Flower's `Context.state` is not used: it lives in memory only. Clients whose arrays have
# the same names, types and shapes are written and read together.

Arrays = Mapping[str, np.ndarray | Sequence[SparseUpdate]]
"""By name the arrays of n clients, `[n, ...]`, or of a table `[rows, d]` of each of them the rows
that are not zero."""


class PrivateState(DatabaseFile):
    """Private arrays, keyed by client and round."""

    opening = (
        # The state of a client may be a table of items: large pages are read and written at once,
        # and neither what is deleted nor the journal of a round is written again.
        "PRAGMA page_size = 65536",
        "PRAGMA secure_delete = OFF",
        "PRAGMA journal_mode = TRUNCATE",
        "CREATE TABLE IF NOT EXISTS state (client INTEGER, round INTEGER, layout TEXT, data BLOB,"
        " PRIMARY KEY (client, round))",
    )
    fix = "start a new run, as this one's private state is damaged or of another version"

    def load(self, client: int, before_round: int) -> dict[str, np.ndarray]:
        """The newest arrays of a client written before a round; empty when there are none."""
        saved = self.load_all([int(client)], before_round)
        return {name: value[0] for _, arrays in saved for name, value in arrays.items()}

    def load_all(
        self, clients: Sequence[int], before_round: int, names: Collection[str] | None = None
    ) -> list[tuple[list[int], dict[str, np.ndarray]]]:
        """Load the state of several clients, of the arrays with these names; None: of all.

        Returns:
            Positions of clients, and their arrays `[n, ...]`; a client without any is left out.
        """
        if self.file is not None and not self.file.exists():
            return []
        query = (
            "SELECT key, layout, data FROM json_each(?) JOIN state ON client = value AND round ="
            " (SELECT MAX(round) FROM state AS last WHERE last.client = value AND last.round < ?)"
        )
        alike: dict[str, tuple[list[int], list[bytes]]] = {}
        with self._connect() as connection:
            rows = connection.execute(query, (json.dumps(list(clients)), int(before_round)))
            for position, layout, data in rows:
                positions, entries = alike.setdefault(layout, ([], []))
                positions.append(position)
                entries.append(data)
        return [
            (positions, _decoded(parse_json(layout, MOST_JSON), entries, names))
            for layout, (positions, entries) in alike.items()
        ]

    def save_all(
        self, arrays: Iterable[tuple[Sequence[int], Arrays]], round_number: int, *, keep: int
    ) -> None:
        """Write clients' arrays for a round, in one transaction; entries of that round or later (a
        broken run's) are replaced.

        Args:
            arrays: clients and their private arrays; each client once.
            round_number: the round that produced them.
            keep: number of rounds, up to this one, whose state is kept.
        """
        number = int(round_number)
        rows = [
            (int(client), number, layout, data)
            for clients, values in arrays
            for client, layout, data in _encoded(clients, values)
        ]
        written = json.dumps([row[0] for row in rows])
        these = "client IN (SELECT value FROM json_each(?))"
        with self._connect() as connection:
            connection.execute(f"DELETE FROM state WHERE round >= ? AND {these}", (number, written))
            connection.executemany("INSERT INTO state VALUES (?, ?, ?, ?)", rows)
            connection.execute(
                f"DELETE FROM state WHERE {these} AND round < ?2 AND round < (SELECT MAX(round)"
                " FROM state AS last WHERE last.client = state.client AND last.round <= ?2)",
                (written, number - keep + 1),
            )


def _encoded(clients: Sequence[int], arrays: Arrays) -> Iterator[tuple[int, str, np.ndarray]]:
    """Clients, the layout of their arrays (`_record`) and the bytes of these."""
    if len(clients) > 1 and not all(isinstance(value, np.ndarray) for value in arrays.values()):
        for index, client in enumerate(clients):
            yield from _encoded(
                [client], {name: value[index : index + 1] for name, value in arrays.items()}
            )
        return
    layout = []
    fields = {}
    for name, value in arrays.items():
        if isinstance(value, np.ndarray):
            layout.append((name, value.dtype.str, value.shape[1:], None))
            fields[name] = value
        else:
            (table,) = value
            layout.append((name, table.values.dtype.str, table.shape, len(table.rows)))
            fields |= {_ROWS + name: table.rows, name: table.values}
    records = np.empty(len(clients), _record(layout))
    for name, value in fields.items():
        records[name] = value
    text = json.dumps(layout)
    entries = records.view(np.uint8).reshape(len(clients), records.itemsize)
    for client, entry in zip(clients, entries, strict=True):
        yield client, text, entry


def _decoded(
    layout: Sequence[Any], entries: Sequence[bytes], names: Collection[str] | None
) -> dict[str, np.ndarray]:
    """The arrays of entries of one layout, `[n, ...]` each, which cannot be written."""
    records = np.ndarray(len(entries), _record(layout), b"".join(entries))
    arrays = {}
    for name, dtype, shape, count in layout:
        if names is not None and name not in names:
            continue
        value = records[name]
        if count is not None:
            table = np.zeros((len(entries), *shape), dtype)
            table[np.arange(len(entries))[:, None], records[_ROWS + name]] = value
            value = table
        arrays[name] = value
    return arrays


_ROWS = "rows of "


def _record(layout: Sequence[Any]) -> np.dtype:
    """The type of a client's entry: by name the type and shape of each array and, of a table, how
    many rows are written, after their numbers."""
    fields: list[Any] = []
    for name, dtype, shape, count in layout:
        rows = tuple(shape)
        if count is not None:
            fields.append((_ROWS + name, "<i8", (count,)))
            rows = (count, *shape[1:])
        fields.append((name, dtype, rows))
    return np.dtype(fields)


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
        """True if a sum that is to be masked is the first one of its round, which is recorded, or
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
        """True if a sum that is to be unmasked is the first one of its round, whose survivors are
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
