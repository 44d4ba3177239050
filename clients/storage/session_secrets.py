# SPDX-License-Identifier: Apache-2.0
"""Secrets of secure aggregation, kept by the node that made them: every message of a session may be
handled by a new process.

One SQLite file per node and run, readable by its owner only; what is deleted is overwritten. A node
has one channel key per run and at most one session, with the states `shared`, `masked`, deleted, in
this order; no session begins twice. Nothing of it is ever logged.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping

from fedrec.errors import RefusalError
from fedrec.runtime.database_file import DatabaseFile
from fedrec.runtime.text_files import MOST_JSON, parse_json


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
            found = connection.execute(query, row[:2]).fetchone()
        return found is not None

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
            found = connection.execute(query, (*row[1:], survivors)).fetchone()
        return found is not None


def _one(connection: sqlite3.Connection, session: bytes, stage: str) -> dict[str, bytes]:
    query = "SELECT secrets FROM session WHERE id = ? AND stage = ?"
    found = connection.execute(query, (session, stage)).fetchone()
    if found is None:
        raise _taken(
            f"the node's latest session, at the stage {stage!r}; each step once",
            "another session, or a step that was taken before",
        )
    secrets = parse_json(found[0], MOST_JSON)
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
