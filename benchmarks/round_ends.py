# SPDX-License-Identifier: Apache-2.0
"""When the rounds of one of fedrec's runs ended."""

from __future__ import annotations

import time
from typing import Any

from server.callbacks.base import Callback


class RoundEnds(Callback):
    """Notes the monotonic time at the end of each round, everything that belongs to the round
    included.

    Attributes:
        ends: the times, in seconds.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """A round is complete and saved; `row` is its line in rounds.csv. Return True to end the
        run here."""
        self.ends.append(time.monotonic())
        return False

    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of each round but the first, which holds the starting of workers."""
        return list(zip(self.ends, self.ends[1:], strict=False))
