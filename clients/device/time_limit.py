# SPDX-License-Identifier: Apache-2.0
"""The time limit of the process that works on one message."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End this process by the signal SIGVTALRM after so much processor time, of all its threads.

    This also ends work in native code, which no exception would interrupt. The executor reports the
    failure.
    """
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
