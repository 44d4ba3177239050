# SPDX-License-Identifier: Apache-2.0
"""Signals that end a process interrupt what it does, as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupting() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `KeyboardInterrupt` in the main thread, so that a run records how it
    ended and its processes are stopped.

    Existing handlers stay, except Ray's, which only ends the process: Flower's processes use theirs
    to unregister from the SuperLink.
    """
    changed = {}
    if threading.current_thread() is threading.main_thread():
        for sign in (signal.SIGTERM, signal.SIGHUP):
            present = signal.getsignal(sign)
            if present is signal.SIG_DFL or getattr(present, "__module__", "").startswith("ray."):
                changed[sign] = present
                signal.signal(sign, _interrupt)
    try:
        yield
    finally:
        for sign, before in changed.items():
            signal.signal(sign, before)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
