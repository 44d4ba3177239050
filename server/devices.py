# SPDX-License-Identifier: Apache-2.0
"""Availability and lateness of simulated devices, applied after sampling."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedrec.components.registry import STEP
from fedrec.data.population import POPULATIONS
from fedrec.devices import Devices, DevicesConfig
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import ClosingConfig, Experiment
from fedrec.privacy.personal import PersonalNoise
from fedrec.runtime.files import parse_json
from server.checkpoint import RunExtension
from server.cohort import SampledCohorts
from strategies.base import CohortStrategy, GeneratingStrategy, parts_of

# A device's speed is known (`fedrec.devices`), so what would happen in a round is known before it:
# only the clients whose answers count are trained. Evaluations take no simulated time.
#
# A round starts when as many clients are available as it needs, and asks those. A device that
# becomes unavailable before it has replied is lost for the round; the server notices at that time.

_HOUR = 3600.0
_MOST_WAITS = 10_000  # times at which a client becomes available
SECONDS = "simulated-seconds"
"""Column of rounds.csv: simulated seconds from the start of the run to the end of the round."""


class Timeline(RunExtension):
    """Simulated time of a run: chooses the clients of each round among those that the sampler
    draws.

    Args:
        experiment: the experiment.
        config: its `[devices]` table.
    """

    name = "devices"

    def __init__(self, experiment: Experiment, config: DevicesConfig) -> None:
        self.experiment = experiment
        self.devices = Devices(config, experiment.seed)
        self.clock = 0.0
        self._counts: Counter[str] = Counter()
        self._bytes = 0
        self._planned = 0  # the planned round
        self._taken = np.empty(0, dtype=np.int64)

    def cohort(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        """Clients whose replies a round uses, `int64 [clients]`, ascending; the same at each call
        until the round is complete."""
        if self._planned != round_number:
            self._taken = self._plan(round_number, cohorts)
            self._planned = round_number
        return self._taken

    def groups(self, clients: np.ndarray) -> Iterable[np.ndarray]:
        """Group the clients of a round, `int64 [clients]`; each group gets a message."""
        return [clients]

    def announce(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """Record the size of the parameters, all of which count in every round; prints nothing."""
        self._bytes = sum(value.nbytes for value in theta.values())
        return []

    def memory(self) -> dict[str, np.ndarray]:
        """Return the simulated time and the totals."""
        counts = np.frombuffer(json.dumps(self._counts).encode(), dtype=np.uint8)
        return {"clock": np.asarray(self.clock), "counts": counts}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        self._counts = Counter(parse_json(memory["counts"].tobytes()))
        self.clock = float(memory["clock"])

    def report(self, rounds: int) -> dict[str, Any]:
        """Report the simulated time and the number of late replies."""
        hours = self.clock / _HOUR
        words = f"Simulated time of {rounds} rounds: {hours:.4g} hours. {self._in_words()}"
        return {"hours": hours, **self._counts, "in words": [words]}

    @abstractmethod
    def _plan(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        """Choose the clients whose replies a round uses, `int64 [clients]`, ascending; counted when
        the round is complete."""

    @abstractmethod
    def after_round(self, round_number: int, arrays: ArrayRecord) -> dict[str, Any]:
        """Complete the planned round; returns its counts, such as late clients."""

    @abstractmethod
    def _in_words(self) -> str:
        """Describe the totals in a sentence."""

    def _ends(self, clients: np.ndarray, at: float) -> tuple[np.ndarray, np.ndarray]:
        """Reply times `float64 [n]` of clients `[n]` asked at a time, and mask `bool [n]` of lost
        ones, which become unavailable at that time."""
        ends = at + self.devices.seconds(clients, self._examples(clients), self._bytes / 10**6)
        gone = self.devices.available_until(clients, at)
        return np.minimum(ends, gone), ends > gone

    def _examples(self, clients: np.ndarray) -> np.ndarray | float:
        fixed = self.devices.config.examples
        if fixed is not None:
            return fixed
        rows = POPULATIONS.population(self.experiment).counts(clients)
        return rows * float(self.experiment.step.options.get("epochs", 1))

    def _present(self, clients: np.ndarray, at: float) -> np.ndarray:
        """Select the clients `[n]` that are available at a time."""
        return clients[self.devices.available_until(clients, at) > at]

    def _when_present(self, clients: np.ndarray, number: int, at: float) -> float:
        """First time, not before `at`, at which `number` of the clients are available.

        Raises:
            ExperimentError: there is no such time.
        """
        for _ in range(_MOST_WAITS):
            if len(self._present(clients, at)) >= number:
                return at
            back = np.sort(self.devices.returns_at(clients, at))
            later = back[back > at]
            if len(clients) < number or not len(later) or not np.isfinite(later[0]):
                break
            at = max(float(back[number - 1]), float(later[0]))
            if not np.isfinite(at):
                break
        raise ExperimentError(
            f"a cohort of {number} is impossible",
            expected=f"{number} clients that are available at the same time",
            fix="set a smaller sampler.cohort, or more hours in devices.nightly",
        )


# Synchronous rounds on simulated devices: a round closes when enough clients have answered, or at
# its deadline (Bonawitz et al. 2019, section 2.2: over-selection, and a round without stragglers).
#
# Late answers are dropped. Their clients have downloaded the parameters, which `late-bytes` counts.


def closed(
    clients: np.ndarray, ends: np.ndarray, lost: np.ndarray, start: float, config: ClosingConfig
) -> tuple[np.ndarray, float]:
    """Choose the replies that a round uses, and the simulated time, in seconds, at which it closes.

    Args:
        clients: `int64 [clients]`, ids, which order simultaneous replies.
        ends: `float64 [clients]`, time at which each has replied, or is lost.
        lost: `bool [clients]`, True for clients that do not reply.
        start: time at which the round started.
        config: conditions on which it closes.

    Returns:
        Indices `int64 [n]` of the clients whose replies are used, in order of arrival; the time.
    """
    if not len(clients):
        return np.empty(0, dtype=np.int64), start
    order = np.lexsort((clients, ends))
    deadline = math.inf if config.deadline is None else start + config.deadline
    answers = order[~lost[order]]
    needed = config.needed(len(clients))
    taken = answers[ends[answers] <= deadline][:needed]
    if len(taken) == needed:
        return taken, float(ends[taken[-1]])
    return taken, min(deadline, float(ends.max()))


class SynchronousTimeline(Timeline):
    """Rounds whose clients start at the same time from the same parameters."""

    def _plan(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        config = self.experiment.closing or ClosingConfig()
        start = self.clock
        present = None
        if self.devices.config.nightly is not None:
            cohort = cohorts.section.options.get("cohort", 1)
            number = math.ceil(config.asked(cohort))
            start = self._when_present(cohorts.clients, number, start)
            present = self._present(cohorts.clients, start)
        asked = cohorts.drawn(round_number, present)
        taken, self._ended = closed(asked, *self._ends(asked, start), start, config)
        self._asked = len(asked)
        return np.sort(asked[taken])

    def after_round(self, round_number: int, arrays: ArrayRecord) -> dict[str, Any]:
        """Complete the planned round; returns its numbers of late clients and their bytes."""
        late = self._asked - len(self._taken)
        self.clock = self._ended
        self._counts.update({"asked": self._asked, "late": late})
        return {SECONDS: self.clock, "late-clients": late, "late-bytes": late * self._bytes}

    def _in_words(self) -> str:
        asked = self._counts["asked"]
        late = self._counts["late"]
        if not late:
            return f"All {asked} replies were in time."
        share = late / asked
        return f"{late} of {asked} replies ({share:.1%}) were late or missing, and were dropped."


# Checks of experiments and strategies with simulated time.


def time_needed(table: str) -> ExperimentError:
    """Error for a table that needs simulated time, without `[devices]`."""
    return ExperimentError(
        f"[{table}] needs simulated or real reply times of devices",
        expected="[devices] in a simulation" + (", or real nodes" if table == "closing" else ""),
        fix="add [devices], such as --set 'devices={}'",
    )


def check_named_clients(strategy: Strategy, table: str) -> list[Strategy]:
    """Check that a strategy sends the global parameters to clients by id.

    Args:
        strategy: that of the experiment.
        table: the table that needs it.

    Returns:
        The strategies of its phases.

    Raises:
        ExperimentError: it does not.
    """
    parts = parts_of(strategy)
    if not all(isinstance(p, CohortStrategy) for p in parts) or any(
        isinstance(part, GeneratingStrategy) for part in parts
    ):
        raise ExperimentError(
            f"strategy {type(strategy).__name__!r} does not work with [{table}]",
            expected="a strategy of fedrec's that sends the global parameters to its clients",
            fix=f"set strategy.name = 'reptile', or leave out [{table}]",
        )
    return parts


def check_personal_noise(experiment: Experiment) -> None:
    """Check that users' own budgets, which count requests, are not combined with late devices,
    where more clients are asked than reply.

    Raises:
        ExperimentError: they are.
    """
    known_cohorts = experiment.known_cohorts
    if known_cohorts and isinstance(experiment.settings(STEP), PersonalNoise):
        raise ExperimentError(
            "users' own budgets count the rounds in which they are asked, but late devices upload"
            " in others",
            got=f"step {experiment.step.name!r}",
            fix="leave these tables out, or choose a step without users' own noise",
        )
