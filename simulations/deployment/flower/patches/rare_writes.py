# SPDX-License-Identifier: Apache-2.0
"""Records of bytes and of lost tasks, written to the SuperLink's database once a second.

Missing in Flower: bookkeeping that is independent of the number of pieces. With every piece of a
message it marks tasks without heartbeats, and adds up bytes, in a database with one writer at a
time. With many nodes that was half of the SuperLink's work; here it is done for all pieces of a
second. Of the bytes, which are shown and used for nothing else, those of a run's last second may be
missing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any

from flwr.server.superlink.linkstate import linkstate_factory

SETTLING = 1.0
"""Smallest number of seconds between two checks for lost tasks, and between two records of
transferred bytes."""


class Throttle:
    """Rate limit: one caller at a time, and none for some seconds after it.

    Args:
        seconds: pause after a caller.
        at_once: whether the first caller need not wait.
        clock: monotonic seconds.
    """

    def __init__(
        self, seconds: float, *, at_once: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._busy = Lock()
        self._next = clock() + (0.0 if at_once else seconds)

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, if it is due and no other caller does it."""
        if self._clock() >= self._next and self._busy.acquire(blocking=False):
            try:
                work()
            finally:
                self._next = self._clock() + self._seconds
                self._busy.release()


class RareWrites(linkstate_factory.SqlLinkState):  # type: ignore[misc]
    """The state of a SuperLink with fewer writes to its file."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._expiring = Throttle(SETTLING)
        self._entering = Throttle(SETTLING)
        self._bytes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._counting = Lock()

    def store_traffic(self, run_id: int, bytes_sent: int, bytes_recv: int) -> None:
        """As Flower's; written once a second."""
        with self._counting:
            counts = self._bytes[run_id]
            counts[0] += bytes_sent
            counts[1] += bytes_recv
        self._entering.run(self._enter_bytes)

    def _cleanup_expired_task_tokens(self) -> None:
        """As Flower's; at most once a second."""
        self._expiring.run(super()._cleanup_expired_task_tokens)

    def _enter_bytes(self) -> None:
        with self._counting:
            counted = self._bytes
            self._bytes = defaultdict(lambda: [0, 0])
        for run_id, (sent, received) in counted.items():
            with suppress(ValueError):  # the run was deleted
                super().store_traffic(run_id, bytes_sent=sent, bytes_recv=received)
