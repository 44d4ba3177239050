# SPDX-License-Identifier: Apache-2.0
"""When devices are available: always, or some hours of each day."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

DAY = 86400.0
"""Seconds of a day."""
_CLOSE = 1e-6  # seconds before the start of an interval that count as its start


class Availability(Protocol):
    """Availability of devices."""

    def until(self, devices: np.ndarray, at: float) -> np.ndarray:
        """Until when each of the devices `[n]` that are available at a time stays so, `float64
        [n]`, in seconds; minus infinity for those that are not."""
        ...

    def back(self, devices: np.ndarray, at: float) -> np.ndarray:
        """From when on each is available: `at` for those that are, else the next time, `float64
        [n]`; infinity for those that never are."""
        ...


class Always(Availability):
    """All devices are available at any time."""

    def until(self, devices: np.ndarray, at: float) -> np.ndarray:
        return np.full(len(devices), np.inf)

    def back(self, devices: np.ndarray, at: float) -> np.ndarray:
        return np.full(len(devices), at)


@dataclass(frozen=True, eq=False)
class Daily(Availability):
    """Each device is available once a day.

    Attributes:
        starts: `float64 [devices]`, seconds after midnight at which that begins.
        seconds: how long it lasts, less than a day.
    """

    starts: np.ndarray
    seconds: float

    def until(self, devices: np.ndarray, at: float) -> np.ndarray:
        since = self._since(devices, at)
        return np.where(since < self.seconds, at + self.seconds - since, -np.inf)

    def back(self, devices: np.ndarray, at: float) -> np.ndarray:
        since = self._since(devices, at)
        return np.where(since < self.seconds, at, at + DAY - since)

    def _since(self, devices: np.ndarray, at: float) -> np.ndarray:
        """Seconds since each device last became available."""
        since = np.mod(at - self.starts[devices], DAY)
        return np.where(since > DAY - _CLOSE, 0.0, since)
