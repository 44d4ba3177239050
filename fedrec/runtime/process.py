# SPDX-License-Identifier: Apache-2.0
"""This process: signals that end it, forks, freed memory, and sleep times of loops."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupting() -> Iterator[None]:
    """Raise `KeyboardInterrupt` in the main thread on SIGTERM and SIGHUP, so that a run records how
    it ended and stops its processes.

    Existing handlers stay, except Ray's, which only ends the process: Flower's processes use theirs
    to unregister from the SuperLink.
    """
    changed = {}
    if threading.current_thread() is threading.main_thread():
        interrupt = _Interrupt()
        for sign in _SIGNS:
            present = signal.getsignal(sign)
            if _only_ends(present):
                changed[sign] = present
                signal.signal(sign, interrupt)
    try:
        yield
    finally:
        for sign, before in changed.items():
            signal.signal(sign, before)


def raise_if_interrupted() -> None:
    """Raise `KeyboardInterrupt` again if a signal came since `interrupting` began: native code that
    calls Python may drop the exception and continue."""
    for handler in map(signal.getsignal, _SIGNS):
        if isinstance(handler, _Interrupt) and handler.received:
            raise KeyboardInterrupt(handler.received)


class _Interrupt:
    """Signal handler that raises `KeyboardInterrupt`."""

    received = ""
    """Name of the last signal."""

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        raise KeyboardInterrupt(self.received)


def _only_ends(handler: object) -> bool:
    """True if a handler is the default one, or Ray's."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return str(getattr(handler, "__module__", "")).startswith("ray.")


# Forks of this process that exit without the parent's exit handlers.


class Fork:
    """Fork of this process that runs `work` and ends; its status is 0, the code of `SystemExit`, or
    1 after an error.

    Args:
        work: function that the fork runs.

    Attributes:
        pid: its process id.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.pid = os.fork()
        if not self.pid:
            _end_after(work)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its status, or minus the signal that ended it; None while it runs."""
        if self._code is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                ended = self.pid
                status = 0
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code


def _end_after(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # The parent's resources are not closed here, because its connections are shared.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# Sleep times of polling loops: short while there is work, and growing otherwise.


class Backoff:
    """Growing sleep times, so that the delay of a reply is at most a fixed share of the waiting
    time.

    Args:
        first: seconds of the first sleep.
        longest: seconds of the longest sleep.
        growth: factor from one sleep to the next.
    """

    def __init__(self, first: float, longest: float, growth: float = 1.1) -> None:
        self._first = first
        self._longest = longest
        self._growth = growth
        self._next = first

    def next(self) -> float:
        """Return the seconds of the next sleep."""
        pause = self._next
        self._next = min(pause * self._growth, self._longest)
        return pause

    def restart(self) -> None:
        """Reset after work: the next sleep is the shortest one."""
        self._next = self._first
