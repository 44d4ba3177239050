# SPDX-License-Identifier: Apache-2.0
"""How long Flower's loops sleep between two questions: short while there is work, ever longer without."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Ramp:
    """Sleeps that grow, so that an answer is late by a fixed share of the time that was waited for it.

    Args:
        first: seconds of the first sleep.
        longest: seconds that none is longer than.
        growth: factor from one sleep to the next.
    """

    def __init__(self, first: float, longest: float, growth: float = 1.1) -> None:
        self._first, self._longest, self._growth = first, longest, growth
        self._next = first

    def next(self) -> float:
        """Seconds of the next sleep."""
        pause = self._next
        self._next = min(pause * self._growth, self._longest)
        return pause

    def restart(self) -> None:
        """There is work: the next sleep is the first one again."""
        self._next = self._first


class PacedTime:
    """Stands for the module `time` in one of Flower's loops.

    Args:
        pace: from the seconds that the loop would sleep to those that it does.
        sleep: what sleeps.
    """

    def __init__(self, pace: Callable[[float], float], sleep: Callable[[float], None] = time.sleep) -> None:
        self._pace, self._sleep = pace, sleep

    def sleep(self, seconds: float) -> None:
        """Sleep as long as the pace says."""
        self._sleep(self._pace(seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
