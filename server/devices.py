# SPDX-License-Identifier: Apache-2.0
"""Simulated time: what clients' devices have to do with the rounds of a run."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedrec.data.population import POPULATIONS
from fedrec.devices import Devices, DevicesConfig
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.experiment.tables import ClosingConfig
from fedrec.runtime.files import parse_json
from server.checkpoint import RunExtension
from server.cohort import SampledCohorts

# The simulated time of devices, which decides beside the sampler who takes part in rounds.


class LateDevices(RunExtension):
    """Chooses the clients of each round among those that the sampler draws, and counts."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._columns: dict[str, Any] = {}

    @abstractmethod
    def cohort(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        """The clients whose answers a round takes, `int64 [clients]`, ascending; the same at
        each call until the round is complete."""

    def columns(self) -> dict[str, Any]:
        """Numbers of clients whose answers came late, and the like."""
        return self._columns

    def memory(self) -> dict[str, np.ndarray]:
        """The totals."""
        return {"counts": np.frombuffer(json.dumps(self._counts).encode(), dtype=np.uint8)}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        self._counts = Counter(parse_json(memory["counts"].tobytes()))


# The simulated time of a run, and what its clients' devices have to do with it.
#
# A device's speed is known (`fedrec.devices`), so what would happen in a round is known before it:
# only the clients whose answers count are trained. Evaluations take no simulated time.
#
# A round starts when as many clients are available as it asks for, and asks those. A device that
# becomes unavailable before it has answered is lost for the round; the server notices when it goes.

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
        gone = self.devices.available_until(clients, at)
        return np.minimum(ends, gone), ends > gone

    def _examples(self, clients: np.ndarray) -> np.ndarray | float:
        fixed = self.devices.config.examples
        if fixed is not None:
            return fixed
        rows = POPULATIONS.population(self.experiment).counts(clients)
        return rows * float(self.experiment.step.options.get("epochs", 1))

    def _present(self, clients: np.ndarray, at: float) -> np.ndarray:
        """Those of the clients `[n]` that are available at a time."""
        return clients[self.devices.available_until(clients, at) > at]

    def _when_present(self, clients: np.ndarray, number: int, at: float) -> float:
        """The first time, not before `at`, at which so many of the clients are available.

        Raises:
            ExperimentError: there is none.
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
            "so many clients are never available at one time",
            expected=f"{number} clients",
            got=f"fewer of the {len(clients)} clients",
            fix="set a smaller sampler.cohort, or more hours in devices.nightly",
        )


# Synchronous rounds on simulated devices: a round closes when enough clients have answered, or at
# its deadline (Bonawitz et al. 2019, section 2.2: over-selection, and a round without stragglers).
#
# Late answers are dropped. Their clients have downloaded the parameters, which `late-bytes` counts.


@dataclass(frozen=True, eq=False)
class Closed:
    """A round's answers.

    Attributes:
        taken: `int64 [n]`, places of the clients whose answers are taken, the first answer first.
        at: when the round closes, in simulated seconds.
    """

    taken: np.ndarray
    at: float


def closed(
    clients: np.ndarray, ends: np.ndarray, lost: np.ndarray, start: float, config: ClosingConfig
) -> Closed:
    """The answers that a round takes, and when it closes.

    Args:
        clients: `int64 [clients]`, which decide between answers of the same time.
        ends: `float64 [clients]`, when each has answered, or is lost.
        lost: `bool [clients]`, which do not answer.
        start: when the round started.
        config: when it closes.
    """
    if not len(clients):
        return Closed(np.empty(0, dtype=np.int64), start)
    order = np.lexsort((clients, ends))
    deadline = math.inf if config.deadline is None else start + config.deadline
    answers = order[~lost[order]]
    needed = config.needed(len(clients))
    taken = answers[ends[answers] <= deadline][:needed]
    if len(taken) == needed:
        return Closed(taken, float(ends[taken[-1]]))
    return Closed(taken, min(deadline, float(ends.max())))


class SynchronousTimeline(Timeline):
    """Rounds whose clients start at one time and from the same parameters."""

    def _plan(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        config = self.experiment.closing or ClosingConfig()
        start = self.clock
        present = None
        if self.devices.config.sometimes_away:
            cohort = cohorts.section.options.get("cohort", 1)
            number = math.ceil(config.asked(cohort))
            start = self._when_present(cohorts.clients, number, start)
            present = self._present(cohorts.clients, start)
        asked = cohorts.drawn(round_number, present)
        self._asked = len(asked)
        self._closed = closed(asked, *self._ends(asked, start), start, config)
        return np.sort(asked[self._closed.taken])

    def _complete(self, round_number: int, arrays: ArrayRecord) -> dict[str, Any]:
        late = self._asked - len(self._closed.taken)
        self.clock = self._closed.at
        self._counts.update({"asked": self._asked, "late": late})
        return {SECONDS: self.clock, "late-clients": late, "late-bytes": late * self._bytes}

    def _in_words(self) -> str:
        asked = self._counts["asked"]
        late = self._counts["late"]
        if not late:
            return f"All {asked} answers came in time."
        share = late / asked
        return f"{late} of {asked} answers ({share:.1%}) were late or did not come, and not taken."


# Who starts next where a client that has answered is replaced at once: those that the sampler
# draws, one cohort after the other.


class Starters:
    """The order in which clients start."""

    def __init__(self) -> None:
        self._draws = 0  # of the sampler
        self._next: list[int] = []  # drawn clients that have not started, the last one first

    def start(
        self,
        number: int,
        cohorts: SampledCohorts,
        busy: set[int],
        present: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Clients that start now, `int64 [clients]`, in the order in which they are drawn; fewer
        than `number` if no others may.

        Args:
            number: how many may start.
            cohorts: draws them.
            busy: those who may not.
            present: those of some clients `int64 [n]` that are available.
        """
        started: list[int] = []
        taken = set(busy)
        while len(started) < number:
            client = self._drawn(cohorts, taken, present)
            if client is None:
                break
            started.append(client)
            taken.add(client)
        return np.array(started, dtype=np.int64)

    def _drawn(
        self,
        cohorts: SampledCohorts,
        busy: set[int],
        present: Callable[[np.ndarray], np.ndarray],
    ) -> int | None:
        """The next client; None: nobody else may start."""
        while True:
            while self._next:
                client = self._next.pop()
                if client not in busy and len(present(np.array([client]))):
                    return client
            if np.isin(present(cohorts.clients), list(busy)).all():
                return None
            self._draws += 1
            self._next = cohorts.drawn(self._draws).tolist()[::-1]

    def memory(self) -> dict[str, np.ndarray]:
        """State between rounds."""
        return {"draws": np.asarray(self._draws), "next": np.array(self._next, dtype=np.int64)}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        self._draws = int(memory["draws"])
        self._next = memory["next"].tolist()


def refuse_small(clients: int, buffer: int, concurrency: int) -> None:
    """Refuse more clients at a time than there are, beside those in the buffer.

    Raises:
        ExperimentError: `concurrency` is larger.
    """
    most = clients - buffer + 1
    if concurrency > max(most, buffer):
        raise ExperimentError(
            "wrong value for 'asynchronous.concurrency'",
            expected=f"at most {most}: the {clients} clients without those whose answers are in"
            " the buffer",
            got=str(concurrency),
            fix="set a smaller number, or a smaller sampler.cohort",
        )
