# SPDX-License-Identifier: Apache-2.0
"""When devices are available: always, some hours of each day, or in the intervals of a trace, which
repeats after its end."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, eq=False)
class Intervals:
    """The intervals of one device.

    Attributes:
        starts: `float64 [n]`, ascending, in seconds.
        ends: `float64 [n]`, each after its start and not after the next one.
        period: seconds after which they repeat.
    """

    starts: np.ndarray
    ends: np.ndarray
    period: float

    def until(self, at: float) -> float:
        """Until when the device is available; minus infinity if it is not."""
        now = at % self.period
        place = self._place(now)
        return at + self.ends[place] - now if place >= 0 and now < self.ends[place] else -np.inf

    def back(self, at: float) -> float:
        """From when on it is available; infinity: never."""
        if not len(self.starts):
            return np.inf
        if self.until(at) > -np.inf:
            return at
        now = at % self.period
        following = self._place(now) + 1
        if following < len(self.starts):
            return at + self.starts[following] - now
        return at + self.period - now + self.starts[0]

    def _place(self, now: float) -> int:
        """The last interval that has begun; -1: none."""
        return int(np.searchsorted(self.starts, now + _CLOSE, side="right")) - 1


@dataclass(frozen=True, eq=False)
class Traced(Availability):
    """Devices with a trace each.

    Attributes:
        traces: their intervals, by place.
    """

    traces: Sequence[Intervals]

    def until(self, devices: np.ndarray, at: float) -> np.ndarray:
        return np.array([self.traces[one].until(at) for one in devices.tolist()], dtype=np.float64)

    def back(self, devices: np.ndarray, at: float) -> np.ndarray:
        return np.array([self.traces[one].back(at) for one in devices.tolist()], dtype=np.float64)
