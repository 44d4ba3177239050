# SPDX-License-Identifier: Apache-2.0
"""Sleep times of polling loops: short while there is work, and growing without."""

from __future__ import annotations


class Backoff:
    """Growing sleep times, so that the delay of an answer is at most a fixed share of the waiting
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
        """Seconds of the next sleep."""
        pause = self._next
        self._next = min(pause * self._growth, self._longest)
        return pause

    def restart(self) -> None:
        """Reset after work: the next sleep is the shortest one."""
        self._next = self._first
