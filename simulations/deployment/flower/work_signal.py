# SPDX-License-Identifier: Apache-2.0
"""A work signal between a SuperNode and its executor: a file that the one touches when there is
work.

Flower's executor polls its SuperNode for a task. Each poll is an HTTPS call, which costs more than
checking a file a hundred times, in two processes: with 200 idle nodes on a machine, one and a half
cores of two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedrec.runtime.backoff import Backoff

WORK_SIGNAL = "FEDREC_NODE_WORK_SIGNAL"
"""Names in the environment the file of a SuperNode and its executor."""
_FIRST_LOOK, _LONGEST_LOOK = 0.02, 0.5  # seconds between two looks at the file


class WorkSignal:
    """A work signal for one listener.

    Args:
        file: in a folder that both may write to; a work signal without a file is never received.
        clock: monotonic seconds.
        pause: what sleeps.
    """

    def __init__(
        self,
        file: Path | None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._file, self._clock, self._pause = file, clock, pause
        self._heard = self._last_signal()

    def send(self) -> None:
        """Wake the sleeping listener; if the signal cannot be sent, it wakes up by itself."""
        if self._file is not None:
            with suppress(OSError):
                self._file.write_bytes(b"")

    def sleep(self, seconds: float) -> None:
        """Sleep so long, or until the signal is sent; not at all if it was sent since the last
        sleep."""
        until, looks = self._clock() + seconds, Backoff(_FIRST_LOOK, _LONGEST_LOOK)
        while (signal := self._last_signal()) == self._heard and (
            left := until - self._clock()
        ) > 0:
            self._pause(min(left, looks.next()))
        self._heard = signal

    def _last_signal(self) -> int | None:
        """Time of the last signal."""
        if self._file is None:
            return None
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return None
