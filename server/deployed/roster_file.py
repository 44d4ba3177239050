# SPDX-License-Identifier: Apache-2.0
"""The nodes that a run has seen and the clients that each announced, in a file that grows by those
that join.

Ids of clients are ascending, so their differences are stored, compressed: a node of a simulated
federation, whose ids are equally spaced, takes hardly any space, and random ids of 62 bits take
about seven bytes each.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from fedrec.errors import RunError
from fedrec.protocol.orders import Presence
from fedrec.runtime.files import DatabaseFile


class RosterFile(DatabaseFile):
    """Presences by Flower's node ids."""

    opening = (
        "CREATE TABLE IF NOT EXISTS nodes (node TEXT PRIMARY KEY, place TEXT NOT NULL,"
        " training_count INTEGER NOT NULL, training BLOB NOT NULL,"
        " evaluated_count INTEGER NOT NULL, evaluated BLOB NOT NULL)",
    )
    fix = "restore it from a backup, or delete it: the nodes are asked again"

    def read(self) -> dict[int, Presence]:
        """All nodes that were added, in the order in which they joined.

        Raises:
            RunError: the file is damaged.
        """
        if self.file is None or not self.file.exists():
            return {}
        with self._connect() as connection:
            rows = connection.execute("SELECT * FROM nodes ORDER BY rowid").fetchall()
        try:
            return {
                int(node): Presence(int(place), _ids(*clients[:2]), _ids(*clients[2:]))
                for node, place, *clients in rows
            }
        except (ValueError, TypeError, zlib.error, OverflowError) as error:
            raise RunError(
                f"{self.file} is not a roster",
                expected="nodes and their clients, as written by fedrec",
                got=str(error),
                fix=self.fix,
            ) from None

    def add(self, joined: Mapping[int, Presence]) -> None:
        """Write nodes that were not there before."""
        rows = [
            (str(node), str(p.partition), *_packed(p.training), *_packed(p.evaluated))
            for node, p in joined.items()
        ]
        with self._connect() as connection:
            connection.executemany("INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?)", rows)


def _packed(ids: np.ndarray) -> tuple[int, bytes]:
    """Number of ids `int64 [n]`, ascending, and their differences."""
    steps = np.diff(ids.astype("<i8"), prepend=np.int64(0))
    return len(ids), zlib.compress(steps.tobytes(), 1)


def _ids(count: int, steps: bytes) -> np.ndarray:
    """The reverse of `_packed`; no more than `count` numbers are unpacked."""
    unpacked = zlib.decompressobj()
    found = unpacked.decompress(steps, max(1, 8 * count))
    if len(found) != 8 * count or not unpacked.eof:
        raise ValueError(f"clients of a node are not the {count} that it announced")
    return np.cumsum(np.frombuffer(found, dtype="<i8"), dtype=np.int64)
