# SPDX-License-Identifier: Apache-2.0
"""Signals that end a process interrupt what it does, as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupting() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `KeyboardInterrupt` in the main thread, so that a run records how it
    ended and its processes are stopped; they and Ctrl-C wait where it is `uninterrupted`.

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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What the main thread does within is finished before a signal interrupts it.

    For work with locks that other threads need: an exception on the way out of `with lock` leaves
    it locked, and those threads, and with them the end of the process, would wait for ever.
    """
    interrupts = _present() if threading.current_thread() is threading.main_thread() else set()
    for one in interrupts:
        one.waiting += 1
    try:
        yield
    finally:
        for one in interrupts:
            one.waiting -= 1
        for one in interrupts:
            one.raise_late()


def raise_if_interrupted() -> None:
    """Raise `KeyboardInterrupt` again if a signal came since `interrupting` began: native code that
    calls Python may drop the exception, and what is interrupted would go on."""
    for one in _present():
        if one.received:
            raise KeyboardInterrupt(one.received)


class _Interrupt:
    """Handles a signal by `KeyboardInterrupt`, at once or when it need not wait any more."""

    def __init__(self) -> None:
        self.waiting = 0
        """How many blocks of code, one within the other, must not be interrupted."""
        self.received = ""
        """Name of the last signal."""
        self._late = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if self.waiting:
            self._late = True
        else:
            raise KeyboardInterrupt(self.received)

    def raise_late(self) -> None:
        """Raise for a signal that had to wait, once no block of code needs that any more."""
        if self._late and not self.waiting:
            self._late = False
            raise KeyboardInterrupt(self.received)


def _present() -> set[_Interrupt]:
    """The handlers of `interrupting`."""
    return {one for one in map(signal.getsignal, _SIGNS) if isinstance(one, _Interrupt)}


def _only_ends(handler: object) -> bool:
    """Whether a handler is the default one, or Ray's."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return str(getattr(handler, "__module__", "")).startswith("ray.")
