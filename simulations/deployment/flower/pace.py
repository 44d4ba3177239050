# SPDX-License-Identifier: Apache-2.0
"""Replaces the sleep times of Flower's polling loops."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class PacedTime:
    """Replaces the module `time` in one of Flower's loops.

    Args:
        pace: maps the seconds that the loop would sleep to those that it sleeps.
        sleep: what sleeps.
    """

    def __init__(
        self, pace: Callable[[float], float], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._pace, self._sleep = pace, sleep

    def sleep(self, seconds: float) -> None:
        """Sleep for the mapped time."""
        self._sleep(self._pace(seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
