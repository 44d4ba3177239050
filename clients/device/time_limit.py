# SPDX-License-Identifier: Apache-2.0
"""The time limits of the process that works on one message."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_after(processor: float, elapsed: float) -> Iterator[None]:
    """End this process after so many seconds of processor time of all its threads (by the signal
    SIGVTALRM), or of elapsed time (SIGALRM); 0 sets no limit.

    This also ends work in native code, which no exception would interrupt. The executor reports the
    failure.
    """
    limits = {signal.ITIMER_VIRTUAL: processor, signal.ITIMER_REAL: elapsed}
    before = {timer: signal.setitimer(timer, limit) for timer, limit in limits.items() if limit}
    try:
        yield
    finally:
        for timer, earlier in before.items():
            signal.setitimer(timer, *earlier)


def seconds_left(sent: float, lives: float, now: float) -> float:
    """Seconds until nobody waits for the answer to a message.

    Args:
        sent: the server's time when the message was created, in seconds.
        lives: seconds that it is valid after that.
        now: this machine's time. If the clocks differ so much that the message would be of the
            future or no longer valid, all its seconds are left, as if it were created now.
    """
    left = sent + lives - now
    return left if 0 < left < lives else lives
