# SPDX-License-Identifier: Apache-2.0
"""Who starts next where a client that has answered is replaced at once: those that the sampler
draws, one cohort after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedrec.errors import ExperimentError
from server.cohorts.selection import SampledCohorts


class Starters:
    """The order in which clients start."""

    def __init__(self) -> None:
        self._draws = 0  # of the sampler
        self._next: list[int] = []  # drawn clients that have not started, the last one first

    def start(
        self,
        number: int,
        cohorts: SampledCohorts,
        busy: set[int],
        present: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Clients that start now, `int64 [clients]`, in the order in which they are drawn; fewer
        than `number` if no others may.

        Args:
            number: how many may start.
            cohorts: draws them.
            busy: those who may not.
            present: those of some clients `int64 [n]` that are available.
        """
        started: list[int] = []
        taken = set(busy)
        while len(started) < number:
            client = self._drawn(cohorts, taken, present)
            if client is None:
                break
            started.append(client)
            taken.add(client)
        return np.array(started, dtype=np.int64)

    def _drawn(
        self,
        cohorts: SampledCohorts,
        busy: set[int],
        present: Callable[[np.ndarray], np.ndarray],
    ) -> int | None:
        """The next client; None: nobody else may start."""
        while True:
            while self._next:
                client = self._next.pop()
                if client not in busy and len(present(np.array([client]))):
                    return client
            if np.isin(present(cohorts.clients), list(busy)).all():
                return None
            self._draws += 1
            self._next = cohorts.drawn(self._draws).tolist()[::-1]

    def memory(self) -> dict[str, np.ndarray]:
        """State between rounds."""
        return {"draws": np.asarray(self._draws), "next": np.array(self._next, dtype=np.int64)}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        self._draws = int(memory["draws"])
        self._next = memory["next"].tolist()


def refuse_small(clients: int, buffer: int, concurrency: int) -> None:
    """Refuse more clients at a time than there are, beside those in the buffer.

    Raises:
        ExperimentError: `concurrency` is larger.
    """
    most = clients - buffer + 1
    if concurrency > max(most, buffer):
        raise ExperimentError(
            "wrong value for 'asynchronous.concurrency'",
            expected=f"at most {most}: the {clients} clients without those whose answers are in"
            " the buffer",
            got=str(concurrency),
            fix="set a smaller number, or a smaller sampler.cohort",
        )
