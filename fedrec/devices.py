# SPDX-License-Identifier: Apache-2.0
"""Simulated devices: speed and availability of each client's device.

A device's properties are a function of the experiment's seed and the client's id, so a resumed run,
or another run with the same seed, has the same devices. Speeds are log-normal, as in Papaya's
measurements (Huba et al. 2022).

A client takes

    examples * seconds per example + megabytes * seconds per megabyte, down and up

seconds, where a megabyte has 10^6 bytes, and both messages have the size of all parameters, as in
FedScale.
"""

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.rng import stream

DAY = 86400.0
"""Seconds per day."""
_CLOSE = 1e-6  # tolerance in seconds before the start of an interval
_BLOCK = 1024  # clients whose properties are drawn together
_DRAWN = 3  # properties of each client


class NightlyConfig(Config):
    """Hours of each day in which a device is available, such as at night, when it is charging on an
    unmetered network. A run starts at midnight."""

    hours: float = Field(default=8.0, gt=0, lt=24)
    """Duration in hours."""
    start: float = Field(default=22.0, ge=0, lt=24)
    """Mean start, as an hour of the day."""
    spread: float = Field(default=2.0, ge=0, le=24)
    """Standard deviation of the start between devices; from 8 on, starts spread over the day."""


class DevicesConfig(Config):
    """Speed and availability of the clients' simulated devices. Simulated seconds are a column of
    rounds.csv."""

    example_seconds: float = Field(default=0.01, ge=0)
    """Median of the devices' seconds per training example."""
    megabyte_seconds: float = Field(default=5.0, ge=0)
    """Median of the seconds per megabyte (10^6 bytes) that is sent to a device and back."""
    compute_spread: float = Field(default=1.0, ge=0, le=10)
    """Standard deviation between devices of the logarithm of the seconds per example; 0: all are
    equally fast."""
    network_spread: float = Field(default=1.0, ge=0, le=10)
    """Standard deviation between devices of the logarithm of the seconds per megabyte."""
    examples: float | None = Field(default=None, gt=0)
    """Number of training examples that determines each device's time, independently of its data, as
    a guarantee for users needs; default: rows of the client times epochs."""
    nightly: NightlyConfig | None = None
    """Hours of each day in which devices are available; default: always."""


class Devices:
    """Devices of an experiment's clients.

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
        """Seconds that clients take from their selection to the end of their upload.

        Args:
            clients: `int64 [clients]`.
            examples: number for each client, `[clients]`, or for all.
            megabytes: size of the parameters.

        Returns:
            `float64 [clients]`.
        """
        config = self.config
        drawn = self._drawn(clients)
        compute = config.example_seconds * np.exp(config.compute_spread * drawn[:, 0])
        network = config.megabyte_seconds * np.exp(config.network_spread * drawn[:, 1])
        return examples * compute + megabytes * network

    def available_until(self, clients: np.ndarray, at: float) -> np.ndarray:
        """End of the current availability of each client `int64 [clients]` at a time,
        `float64 [clients]`, in seconds; minus infinity for unavailable clients."""
        if self.config.nightly is None:
            return np.full(len(clients), np.inf)
        since = self._since(clients, at)
        seconds = self.config.nightly.hours * 3600
        return np.where(since < seconds, at + seconds - since, -np.inf)

    def returns_at(self, clients: np.ndarray, at: float) -> np.ndarray:
        """Earliest time, from `at` on, at which each client is available, `float64 [clients]`, in
        seconds."""
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
        """Normal numbers for computing, network and start of the night, `float64 [clients, 3]`."""
        blocks, members = np.divmod(np.asarray(clients, dtype=np.int64), _BLOCK)
        distinct, index = np.unique(blocks, return_inverse=True)
        for block in distinct.tolist():
            if block not in self._blocks:
                random = stream(self._seed, "devices", block)
                self._blocks[block] = random.standard_normal((_BLOCK, _DRAWN))
        drawn = [self._blocks[block] for block in distinct.tolist()]
        return np.array(drawn).reshape(-1, _BLOCK, _DRAWN)[index, members]
