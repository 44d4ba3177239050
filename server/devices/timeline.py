# SPDX-License-Identifier: Apache-2.0
"""The simulated time of a run, and what its clients' devices have to do with it.

A device's speed is known (`fedrec.devices`), so what would happen in a round is known before it:
only the clients whose answers count are trained. Evaluations take no simulated time.

A round starts when as many clients are available as it asks for, and asks those. A device that
becomes unavailable before it has answered is lost for the round; the server notices when it goes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedrec.data.cache import POPULATIONS
from fedrec.devices.devices import Devices, DevicesConfig
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from server.cohorts.selection import SampledCohorts
from server.devices.late_devices import LateDevices

_HOUR = 3600.0
_MOST_WAITS = 10_000  # times at which somebody becomes available
SECONDS = "simulated-seconds"
"""Column of rounds.csv: simulated seconds from the beginning of the run to the end of the round."""


class Timeline(LateDevices):
    """The simulated time of a run.

    Args:
        experiment: the experiment.
        config: its `[devices]` table.
    """

    name = "devices"

    def __init__(self, experiment: Experiment, config: DevicesConfig) -> None:
        super().__init__()
        self.experiment = experiment
        self.devices = Devices(config, experiment.seed)
        self.clock = 0.0
        self._bytes = 0
        self._planned = 0  # the round that is planned
        self._taken = np.empty(0, dtype=np.int64)

    def cohort(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        """The clients whose answers a round takes, `int64 [clients]`, ascending."""
        if self._planned != round_number:
            self._taken = self._plan(round_number, cohorts)
            self._planned = round_number
        return self._taken

    def announce(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """Nothing; notes the size of the parameters, which counts whole in every round."""
        self._bytes = sum(value.nbytes for value in theta.values())
        return []

    def after_training(self, round_number: int, arrays: ArrayRecord) -> None:
        """The round that was planned is complete."""
        if self._planned == round_number:
            self._columns = self._complete(round_number, arrays)

    def memory(self) -> dict[str, np.ndarray]:
        """The time and the totals."""
        return {"clock": np.asarray(self.clock), **super().memory()}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        super().restore(memory)
        self.clock = float(memory["clock"])

    def report(self, rounds: int) -> tuple[list[str], dict[str, Any]]:
        """The simulated time, and how many answers came late."""
        hours = self.clock / _HOUR
        words = f"Simulated time of {rounds} rounds: {hours:.4g} hours. {self._in_words()}"
        return [words], {"hours": hours, **self._counts, "in words": [words]}

    @abstractmethod
    def _plan(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        """The clients whose answers a round takes, `int64 [clients]`, ascending; what it leads to
        counts once the round is complete."""

    @abstractmethod
    def _complete(self, round_number: int, arrays: ArrayRecord) -> dict[str, Any]:
        """The planned round is complete; its columns."""

    @abstractmethod
    def _in_words(self) -> str:
        """A sentence with the totals."""

    def _ends(self, clients: np.ndarray, at: float) -> tuple[np.ndarray, np.ndarray]:
        """When each of the clients `[n]` that are asked at a time has answered, `float64 [n]`, and
        which do not, `bool [n]`: these go at that time."""
        ends = at + self.devices.seconds(clients, self._examples(clients), self._bytes / 10**6)
        gone = self.devices.until(clients, at)
        return np.minimum(ends, gone), ends > gone

    def _examples(self, clients: np.ndarray) -> np.ndarray | float:
        fixed = self.devices.config.examples
        if fixed is not None:
            return fixed
        rows = POPULATIONS.population(self.experiment).learned_counts(clients)
        return rows * float(self.experiment.step.options.get("epochs", 1))

    def _present(self, clients: np.ndarray, at: float) -> np.ndarray:
        """Those of the clients `[n]` that are available at a time."""
        return clients[self.devices.until(clients, at) > at]

    def _when_present(self, clients: np.ndarray, number: int, at: float) -> float:
        """The first time, not before `at`, at which so many of the clients are available.

        Raises:
            ExperimentError: there is none.
        """
        for _ in range(_MOST_WAITS):
            if len(self._present(clients, at)) >= number:
                return at
            back = np.sort(self.devices.back(clients, at))
            later = back[back > at]
            if len(clients) < number or not len(later) or not np.isfinite(later[0]):
                break
            at = max(float(back[number - 1]), float(later[0]))
            if not np.isfinite(at):
                break
        raise ExperimentError(
            "so many clients are never available at one time",
            expected=f"{number} clients",
            got=f"fewer of the {len(clients)} clients",
            fix="set a smaller sampler.cohort, or more hours in devices.nightly",
        )
