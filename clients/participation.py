# SPDX-License-Identifier: Apache-2.0
"""A node's record over all runs: client ids, rounds, evaluations and uploads, and each run's
experiment.

One SQLite file, readable by its owner only. A client id is drawn once per user from the operating
system's generator and reveals nothing of the user; the server never learns the name. A user's
participation is recorded before its training starts, so a node that is killed counts too many
rounds rather than too few.
"""

import logging
import math
import secrets
from dataclasses import dataclass

import numpy as np

from clients.step import Step
from fedrec.privacy.personal import PersonalNoise
from fedrec.runtime.files import DatabaseFile

NUMBER_BITS = 62


@dataclass(frozen=True)
class Limits:
    """Limits on a client's rounds and privacy cost; None: no limit.

    Attributes:
        rounds: over all runs.
        in_run: in this run.
        noisy: with the client's own noise, over all runs.
        rho: zero-concentrated cost of the client's own noise, over all runs.
    """

    rounds: int | None = None
    in_run: int | None = None
    noisy: int | None = None
    rho: float | None = None


class Participation(DatabaseFile):
    """The participation records of a node."""

    opening = (
        "PRAGMA synchronous = FULL",
        "CREATE TABLE IF NOT EXISTS numbers (name TEXT PRIMARY KEY, number INTEGER UNIQUE)",
        "CREATE TABLE IF NOT EXISTS spent (run TEXT, round INTEGER, client INTEGER, rho REAL)",
        "CREATE TABLE IF NOT EXISTS evaluated (client INTEGER PRIMARY KEY, times INTEGER)",
        "CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, digest TEXT)",
        "CREATE INDEX IF NOT EXISTS by_client ON spent (client)",
        "BEGIN IMMEDIATE",
    )

    def numbers(self, names: list[str]) -> np.ndarray:
        """Client ids of users, `int64 [names]`; drawn for new users."""
        with self._connect() as connection:
            known = dict(connection.execute("SELECT name, number FROM numbers").fetchall())
            for name in names:
                if name not in known:
                    known[name] = secrets.randbits(NUMBER_BITS)
                    connection.execute("INSERT INTO numbers VALUES (?, ?)", (name, known[name]))
        return np.array([known[name] for name in names], dtype=np.int64)

    def spend(
        self,
        run: str,
        round_number: int,
        clients: np.ndarray,
        rho: float | None,
        limits: Limits,
        *,
        again: bool = True,
    ) -> np.ndarray:
        """Record that clients take part in a round, if their limits allow it.

        Args:
            run: the run.
            round_number: the round.
            clients: their numbers, `int64 [clients]`.
            rho: zero-concentrated cost of the client's own noise in this round; 0 where it adds
                none, None for noise without such a cost.
            limits: limits on rounds and cost.
            again: whether a repeated round counts again, as another release; if not, records of
                this and later rounds (of an interrupted run) are removed.

        Returns:
            The clients that may, in the same order.
        """
        with self._connect() as connection:
            if not again:
                rows = [(run, client, round_number) for client in clients.tolist()]
                query = "DELETE FROM spent WHERE run = ? AND client = ? AND round >= ?"
                connection.executemany(query, rows)
            allowed = []
            for client in clients.tolist():
                rounds, in_run, noisy, cost, unknown = connection.execute(
                    "SELECT COUNT(*), COALESCE(SUM(run = ?), 0),"
                    " COALESCE(SUM(rho IS NULL OR rho > 0), 0), COALESCE(SUM(rho), 0),"
                    " COALESCE(SUM(rho IS NULL), 0) FROM spent WHERE client = ?",
                    (run, client),
                ).fetchone()
                after = math.inf if unknown or rho is None else cost + rho
                counts = ((limits.rounds, rounds), (limits.in_run, in_run), (limits.noisy, noisy))
                affordable = limits.rho is None or after <= limits.rho
                if affordable and all(most is None or done < most for most, done in counts):
                    connection.execute(
                        "INSERT INTO spent VALUES (?, ?, ?, ?)", (run, round_number, client, rho)
                    )
                    allowed.append(client)
        return np.array(allowed, dtype=np.int64)

    def evaluate(self, clients: np.ndarray, most: int) -> np.ndarray:
        """Record an evaluation of clients, if their limit over all runs allows it.

        Args:
            clients: their numbers, `int64 [clients]`.
            most: largest number of evaluations of a client over all runs.

        Returns:
            The clients that may, in the same order.
        """
        with self._connect() as connection:
            done = dict(connection.execute("SELECT client, times FROM evaluated").fetchall())
            allowed = [client for client in clients.tolist() if done.get(client, 0) < most]
            rows = [(client, done.get(client, 0) + 1) for client in allowed]
            connection.executemany("INSERT OR REPLACE INTO evaluated VALUES (?, ?)", rows)
        return np.array(allowed, dtype=np.int64)

    def accept(self, run: str, digest: str) -> bool:
        """True if a run has this experiment; the first experiment of a run is recorded."""
        with self._connect() as connection:
            connection.execute("INSERT OR IGNORE INTO runs VALUES (?, ?)", (run, digest))
            (recorded,) = connection.execute(
                "SELECT digest FROM runs WHERE run = ?", (run,)
            ).fetchone()
        return recorded == digest

    def spent(self) -> dict[int, tuple[int, float]]:
        """Rounds and summed rho of every client that has taken part."""
        with self._connect() as connection:
            rows = connection.execute(
                "SELECT client, COUNT(*), COALESCE(SUM(rho), 0) FROM spent GROUP BY client"
            ).fetchall()
        return {int(client): (int(rounds), float(rho)) for client, rounds, rho in rows}


# Uploads of each client, recorded by its node: a device refuses more uploads than planned, so the
# guarantee of a user's own noise does not depend on the server's sampler. One SQLite file per node
# beside the private
# state.
#
# A repeated round counts once if its noise comes from the seed, because the upload has the same
# bits. With noise from the operating system it counts again.

log = logging.getLogger("fedrec")


def permitted(
    ledger: Participation, step: Step, clients: np.ndarray, round_number: int
) -> np.ndarray:
    """Clients whose devices upload in a round, `int64 [clients]`; all if the step sets no limit."""
    most = step.config.uploads
    if most is None:
        return clients
    fresh = isinstance(step.config, PersonalNoise) and step.config.noise == "secure"
    may = ledger.spend("", round_number, clients, 0.0, Limits(rounds=most), again=fresh)
    if len(may) < len(clients):
        message = "round %d: %d devices refuse, after %d uploads each"
        log.warning(message, round_number, len(clients) - len(may), most)
    return may
