# SPDX-License-Identifier: Apache-2.0
"""Replaces the sleep times of Flower's polling loops, and of the web server in a SuperNode.

Missing in Flower: settings for them. A SuperNode polls every 3 s, and looks for a reply every .5 s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from uvicorn import Server

TICK = 1.0
"""Seconds between two checks of a web server for its end (uvicorn: .1, which is most of the cost of
an idle SuperNode)."""


class PacedTime:
    """Replaces the module `time` in one of Flower's loops.

    Args:
        pace: maps the seconds that the loop would sleep to those that it sleeps.
        sleep: function that sleeps.
    """

    def __init__(
        self, pace: Callable[[float], float], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._pace = pace
        self._sleep = sleep

    def sleep(self, seconds: float) -> None:
        """Sleep for the mapped time."""
        self._sleep(self._pace(seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


async def ticking(self: Server) -> None:
    """Replaces uvicorn's `Server.main_loop`."""
    while not await self.on_tick(0):
        await asyncio.sleep(TICK)
