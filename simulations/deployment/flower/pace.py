# SPDX-License-Identifier: Apache-2.0
"""How long Flower's loops sleep between two questions, when we say it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class PacedTime:
    """Stands for the module `time` in one of Flower's loops.

    Args:
        pace: from the seconds that the loop would sleep to those that it does.
        sleep: what sleeps.
    """

    def __init__(
        self, pace: Callable[[float], float], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._pace, self._sleep = pace, sleep

    def sleep(self, seconds: float) -> None:
        """Sleep as long as the pace says."""
        self._sleep(self._pace(seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
