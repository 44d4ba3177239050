# SPDX-License-Identifier: Apache-2.0
"""Signals between processes: work for an executor, and health checks.

A work signal from a SuperNode to its executor: a named pipe that the SuperNode writes to when
there is work.

Flower's executor polls its SuperNode for a task. Each poll is an HTTPS call, which costs
milliseconds in two processes; a process that waits for a pipe costs nothing.
"""

from __future__ import annotations

import os
import select
import ssl
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedrec.runtime.files import read_json

WORK_SIGNAL = "FEDREC_NODE_WORK_SIGNAL"
"""Names in the environment the pipe between a SuperNode and its executor."""
_PIPE_HOLDS = 2**16  # largest number of bytes, so that one read takes all signals


class WorkSignal:
    """A work signal for one listener.

    Args:
        file: the pipe, in a folder that both may write to; a work signal without one, or one that
            cannot be made, is never received.
        pause: function that sleeps if there is no pipe.
    """

    def __init__(self, file: Path | None, pause: Callable[[float], None] = time.sleep) -> None:
        self._file = file
        self._pause = pause
        self._pipe: int | None = None  # opened by the listener

    def send(self) -> None:
        """Wake the listener, or prevent its next sleep; if the signal cannot be sent, the listener
        wakes up by timeout."""
        if self._file is None:
            return
        with suppress(OSError):  # there is no listener, or the pipe is full
            pipe = os.open(self._file, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"\0")
            finally:
                os.close(pipe)

    def listen(self) -> WorkSignal:
        """From now on signals are kept until the next sleep."""
        if self._file is not None and self._pipe is None:
            with suppress(OSError):
                self._pipe = _opened(self._file)
        return self

    def sleep(self, seconds: float) -> None:
        """Sleep for some seconds or until the signal is sent; not at all if it was sent since the
        last sleep."""
        pipe = self.listen()._pipe
        if pipe is None:
            self._pause(seconds)
        elif select.select([pipe], [], [], seconds)[0]:
            with suppress(BlockingIOError):
                os.read(pipe, _PIPE_HOLDS)


def _opened(file: Path) -> int:
    """A pipe to read from, made if there is none. It is opened for writing as well, so that it does
    not end when a sender closes it."""
    if file.exists() and not stat.S_ISFIFO(file.stat().st_mode):
        file.unlink()
    with suppress(FileExistsError):
        os.mkfifo(file, 0o600)
    return os.open(file, os.O_RDWR | os.O_NONBLOCK)


# Health of processes; also as a program, for the health checks of containers.
#
#     python -m simulations.deployment.health answers URL AUTHORITY
#     python -m simulations.deployment.health alive FOLDER
#
# A container is checked every few seconds, so only the standard library is imported: the command
# line of fedrec takes a second of a core to start.


def is_healthy(url: str, authority: Path) -> bool:
    """Return True if a server answers, with a certificate of an authority."""
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with urllib.request.urlopen(url, timeout=3, context=context) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def are_alive(logs: Path) -> bool:
    """Return True if all processes of a supervisor run, by the list in its folder."""
    try:
        running = read_json(logs / "processes.json")["processes"].values()
        return bool(running) and all(Path(f"/proc/{entry['pid']}").exists() for entry in running)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def main(arguments: list[str]) -> int:
    """The exit status: 0 if all is healthy, 1 if not."""
    what, *given = arguments
    well = is_healthy(given[0], Path(given[1])) if what == "answers" else are_alive(Path(given[0]))
    return int(not well)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
