# SPDX-License-Identifier: Apache-2.0
"""Simulated devices: the time that each client's device takes, and the hours in which it is
available.

A device's properties are a function of the experiment's seed and the client's id, so a resumed run
has the same devices, and so do two runs with the same seed that differ in anything else. Speeds are
log-normal, as in Papaya's measurements (Huba et al. 2022).

A client takes

    examples * seconds per example + megabytes * (seconds per megabyte down + up)

seconds, where a megabyte has 10^6 bytes, and both messages count as whole parameters, as in
FedScale.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.rng import stream

DAY = 86400.0
"""Seconds of a day."""
_CLOSE = 1e-6  # seconds before the start of an interval that count as its start
_BLOCK = 1024  # clients whose properties are drawn together
_DRAWN = 3  # properties of each


class NightlyConfig(Config):
    """Hours of each day in which a device is available, such as those at night when it is charged
    and has a network without charges. A run starts at midnight."""

    hours: float = Field(default=8.0, gt=0, lt=24)
    """How long, in hours."""
    start: float = Field(default=22.0, ge=0, lt=24)
    """Mean hour of the day at which they begin."""
    spread: float = Field(default=2.0, ge=0, le=24)
    """Standard deviation of that hour between devices; from 8 on, they are spread over the day."""


class DevicesConfig(Config):
    """Simulated devices of the clients: their speed, and when they are available. Simulated seconds
    are a column of rounds.csv."""

    example_seconds: float = Field(default=0.01, ge=0)
    """Seconds that a device takes for a training example, in the median."""
    megabyte_seconds_down: float = Field(default=1.0, ge=0)
    """Seconds for a megabyte (10^6 bytes) to a device, in the median."""
    megabyte_seconds_up: float = Field(default=4.0, ge=0)
    """Seconds for a megabyte from a device, in the median."""
    compute_spread: float = Field(default=1.0, ge=0, le=10)
    """Standard deviation of the logarithm of the seconds per example between devices; 0: all are
    equally fast."""
    network_spread: float = Field(default=1.0, ge=0, le=10)
    """The same for the seconds per megabyte, of both directions together."""
    examples: float | None = Field(default=None, gt=0)
    """Training examples that every device is timed for, however many it has, so that time does not
    depend on data, which a guarantee for users needs; default: its own rows, times the epochs."""
    nightly: NightlyConfig | None = None
    """Hours of each day in which devices are available; default: always."""

    @property
    def sometimes_away(self) -> bool:
        """True if devices are not always available."""
        return self.nightly is not None


class Devices:
    """The devices of an experiment's clients.

    Args:
        config: the settings.
        seed: the experiment's seed.
    """

    def __init__(self, config: DevicesConfig, seed: int) -> None:
        self.config = config
        self._seed = seed
        self._blocks: dict[int, np.ndarray] = {}

    def seconds(
        self, clients: np.ndarray, examples: np.ndarray | float, megabytes: float
    ) -> np.ndarray:
        """Seconds that clients take from the time at which they are asked to the end of their
        upload.

        Args:
            clients: `int64 [clients]`.
            examples: of each, `[clients]`, or of all.
            megabytes: of the parameters.

        Returns:
            `float64 [clients]`.
        """
        config = self.config
        drawn = self._drawn(clients)
        compute = config.example_seconds * np.exp(config.compute_spread * drawn[:, 0])
        both = config.megabyte_seconds_down + config.megabyte_seconds_up
        network = both * np.exp(config.network_spread * drawn[:, 1])
        return examples * compute + megabytes * network

    def available_until(self, clients: np.ndarray, at: float) -> np.ndarray:
        """The time until which each of the clients `int64 [clients]` that are available at a time
        stays so, `float64 [clients]`, in seconds; minus infinity for those that are not."""
        if self.config.nightly is None:
            return np.full(len(clients), np.inf)
        since = self._since(clients, at)
        seconds = self.config.nightly.hours * 3600
        return np.where(since < seconds, at + seconds - since, -np.inf)

    def returns_at(self, clients: np.ndarray, at: float) -> np.ndarray:
        """The time from which each is available, `float64 [clients]`: `at` for those that are, else
        the next one."""
        if self.config.nightly is None:
            return np.full(len(clients), at)
        since = self._since(clients, at)
        return np.where(since < self.config.nightly.hours * 3600, at, at + DAY - since)

    def _since(self, clients: np.ndarray, at: float) -> np.ndarray:
        """Seconds since each device last became available."""
        nightly = self.config.nightly or NightlyConfig()
        starts = np.mod((nightly.start + nightly.spread * self._drawn(clients)[:, 2]) * 3600, DAY)
        since = np.mod(at - starts, DAY)
        return np.where(since > DAY - _CLOSE, 0.0, since)

    def _drawn(self, clients: np.ndarray) -> np.ndarray:
        """`float64 [clients, 3]`: normal numbers for computing, network and start of the night."""
        blocks, members = np.divmod(np.asarray(clients, dtype=np.int64), _BLOCK)
        distinct, index = np.unique(blocks, return_inverse=True)
        for block in distinct.tolist():
            if block not in self._blocks:
                random = stream(self._seed, "devices", block)
                self._blocks[block] = random.standard_normal((_BLOCK, _DRAWN))
        drawn = [self._blocks[block] for block in distinct.tolist()]
        return np.array(drawn).reshape(-1, _BLOCK, _DRAWN)[index, members]
