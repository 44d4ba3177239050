# SPDX-License-Identifier: Apache-2.0
"""How often each client has uploaded, kept on the node that hosts it: a device refuses more uploads
than planned. A server that asks too often gets nothing; the guarantee of a user's own noise depends
on this and not on the server's sampler. One SQLite file per node beside the private state.

A repeated round counts once if its noise comes from the seed, because the upload has the same bits.
With noise from the operating system it counts again.
"""

from __future__ import annotations

import logging
import sqlite3

import numpy as np

from clients.step import Step
from fedrec.privacy.personal.noise import PersonalNoise
from fedrec.runtime.database_file import DatabaseFile

log = logging.getLogger("fedrec")


class UploadLedger(DatabaseFile):
    """Uploads by client and round."""

    opening = (
        "CREATE TABLE IF NOT EXISTS uploads (client INTEGER, round INTEGER)",
        "CREATE INDEX IF NOT EXISTS by_client ON uploads (client, round)",
    )

    def take(
        self, clients: np.ndarray, round_number: int, limit: int, *, fresh: bool
    ) -> np.ndarray:
        """Count one upload in a round for each client that may still upload.

        Args:
            clients: `int64 [clients]`.
            round_number: the round.
            limit: uploads that a client may make in all.
            fresh: whether a repeated round is another release; if not, uploads of this round and of
                later ones (a broken run's) are taken back first.

        Returns:
            `bool [clients]`, for each client whether it may.
        """
        with self._connect() as connection:
            if not fresh:
                named = [(client, int(round_number)) for client in clients.tolist()]
                connection.executemany("DELETE FROM uploads WHERE client = ? AND round >= ?", named)
            may = np.array(
                [_uploads(connection, client) < limit for client in clients.tolist()], dtype=bool
            )
            rows = [(client, int(round_number)) for client in clients[may].tolist()]
            connection.executemany("INSERT INTO uploads VALUES (?, ?)", rows)
        return may


def _uploads(connection: sqlite3.Connection, client: int) -> int:
    (made,) = connection.execute(
        "SELECT COUNT(*) FROM uploads WHERE client = ?", (client,)
    ).fetchone()
    return made


def permitted(
    ledger: UploadLedger, step: Step, clients: np.ndarray, round_number: int
) -> np.ndarray:
    """Those of the clients, `int64 [clients]`, whose devices upload in a round; all, where the step
    sets no limit."""
    if step.uploads is None:
        return clients
    fresh = isinstance(step.config, PersonalNoise) and step.config.noise == "secure"
    may = ledger.take(clients, round_number, step.uploads, fresh=fresh)
    if not may.all():
        log.warning(
            "round %d: %d devices refuse, having made %d uploads",
            round_number,
            int((~may).sum()),
            step.uploads,
        )
    return clients[may]
