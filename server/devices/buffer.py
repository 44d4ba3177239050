# SPDX-License-Identifier: Apache-2.0
"""Buffered asynchronous aggregation on simulated devices (FedBuff, Nguyen et al. 2022,
algorithm 1).

`concurrency` clients train at a time, each from the parameters that it was sent. A round ends, and
the server takes a step, when the buffer has as many answers as the sampler's cohort has clients. A
client that has answered or is lost is replaced at once; the next clients are those that the sampler
draws, one cohort after the other. So with a concurrency of one cohort and equally fast devices,
each round is the synchronous one.

An answer to parameters of s rounds ago enters the sum with weight 1 / sqrt(1 + s), and the sum is
divided as in a synchronous round: by the number of clients, or the weight of their examples.

Differs from the paper: nobody is in two places at a time, nor twice in one buffer, so that a client
moves a step by no more than one update; answers that come at the same time are ordered by client;
and a client is trained when its answer is taken, with the random stream and the step's settings of
that round.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord

from fedrec.devices.devices import DevicesConfig
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.experiment.tables import AsynchronousConfig
from fedrec.prefixes import strip_prefix
from fedrec.protocol.zero_copy import to_record, zero_copy_arrays
from server.cohorts.selection import SampledCohorts
from server.devices.timeline import SECONDS, Timeline
from strategies.base import Part

_MOST_LOST = 1000  # clients that do not answer, for each that does


class InFlight(NamedTuple):
    """A client that trains; in the order of the queue."""

    end: float
    """When it has answered, or is lost, in simulated seconds."""
    client: int
    version: int
    """Number of rounds that made the parameters that it was sent."""
    lost: bool
    """Whether it does not answer."""


class BufferedTimeline(Timeline):
    """Rounds of the answers that come first, whenever their clients started.

    Args:
        experiment: the experiment.
        config: its `[devices]` table.
        asynchronous: its `[asynchronous]` table.
    """

    def __init__(
        self, experiment: Experiment, config: DevicesConfig, asynchronous: AsynchronousConfig
    ) -> None:
        super().__init__(experiment, config)
        self.config = asynchronous
        self.versions: dict[int, dict[str, np.ndarray]] = {}
        self._queue: list[InFlight] = []
        self._draws = 0  # of the sampler
        self._next: list[int] = []  # drawn clients that have not started, the last one first
        self._answers: list[InFlight] = []
        self._ended = 0.0
        self._lost = 0

    def announce(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """Nothing; keeps the first parameters."""
        if not self.versions:
            self.versions[0] = {name: np.array(value) for name, value in theta.items()}
        return super().announce(theta)

    def parts(
        self, round_number: int, clients: np.ndarray, arrays: ArrayRecord
    ) -> Mapping[str, Part]:
        """The clients of a round, `int64 [clients]`, by the parameters that they were sent, see
        `strategies.base.Staleness`."""
        started = {one.client: one.version for one in self._answers}
        versions = np.array([started[client] for client in clients.tolist()], dtype=np.int64)
        found: dict[str, Part] = {}
        for version in np.unique(versions)[::-1].tolist():
            own = clients[versions == version]
            stale = round_number - 1 - version
            weight = (1 + stale) ** -self.config.staleness_exponent
            if stale:
                found[str(version)] = Part(own, to_record(self.versions[version]), weight)
            else:
                found[""] = Part(own, arrays)
        return found

    def memory(self) -> dict[str, np.ndarray]:
        """Time and totals, the queue, who starts next, and the parameters of those in the queue."""
        queue = sorted(self._queue)
        own = {
            "draws": np.asarray(self._draws),
            "next": np.array(self._next, dtype=np.int64),
            "queue/end": np.array([one.end for one in queue], dtype=np.float64),
            "queue/client": np.array([one.client for one in queue], dtype=np.int64),
            "queue/version": np.array([one.version for one in queue], dtype=np.int64),
            "queue/lost": np.array([one.lost for one in queue], dtype=np.bool_),
        }
        for version, arrays in self.versions.items():
            own |= {f"version/{version}/{name}": value for name, value in arrays.items()}
        return {**super().memory(), **own}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        super().restore(memory)
        self._draws = int(memory["draws"])
        self._next = memory["next"].tolist()
        columns = (memory[f"queue/{name}"].tolist() for name in InFlight._fields)
        self._queue = [InFlight(*row) for row in zip(*columns, strict=True)]
        self.versions = {}
        for key, value in strip_prefix("version/", memory).items():
            version, _, name = key.partition("/")
            self.versions.setdefault(int(version), {})[name] = value

    def _plan(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        buffer = int(cohorts.section.options["cohort"])
        self._refuse_small(len(cohorts.clients), buffer)
        self._answers = []
        self._lost = 0
        now = self.clock
        while len(self._answers) < buffer:
            now = self._refilled(now, round_number, cohorts)
            at = self._queue[0].end
            while self._queue and self._queue[0].end <= at and len(self._answers) < buffer:
                one = heapq.heappop(self._queue)
                if one.lost:
                    self._lost += 1
                else:
                    self._answers.append(one)
            now = max(now, at)
            self._refuse_lost(buffer)
        self._ended = now
        return np.sort(np.array([one.client for one in self._answers], dtype=np.int64))

    def _refilled(self, now: float, round_number: int, cohorts: SampledCohorts) -> float:
        """Let clients start until as many train as may; if nobody trains and nobody is available,
        at the next time at which somebody is. Returns the time."""
        busy = {one.client for one in (*self._queue, *self._answers)}
        if not self._queue and self.devices.config.sometimes_away:
            idle = cohorts.clients[~np.isin(cohorts.clients, list(busy))]
            now = self._when_present(idle, 1, now)
        starting = []
        while len(self._queue) + len(starting) < self.config.concurrency:
            client = self._drawn(now, cohorts, busy)
            if client is None:
                break
            starting.append(client)
            busy.add(client)
        clients = np.array(starting, dtype=np.int64)
        ends, lost = self._ends(clients, now)
        for end, client, gone in zip(ends.tolist(), starting, lost.tolist(), strict=True):
            heapq.heappush(self._queue, InFlight(end, client, round_number - 1, gone))
        return now

    def _drawn(self, now: float, cohorts: SampledCohorts, busy: set[int]) -> int | None:
        """The next client to start, not one of those who train or whose answers are in the buffer;
        None: everybody else is away."""
        while True:
            while self._next:
                client = self._next.pop()
                if client not in busy and len(self._present(np.array([client]), now)):
                    return client
            present = self._present(cohorts.clients, now)
            if np.isin(present, list(busy)).all():
                return None
            self._draws += 1
            self._next = cohorts.drawn(self._draws).tolist()[::-1]

    def _complete(self, round_number: int, arrays: ArrayRecord) -> dict[str, Any]:
        self.clock = self._ended
        stale = [round_number - 1 - one.version for one in self._answers]
        needed = {one.version for one in self._queue}
        self.versions = {n: value for n, value in self.versions.items() if n in needed}
        copied = {name: np.array(value) for name, value in zero_copy_arrays(arrays).items()}
        self.versions[round_number] = copied
        late = sum(one > 0 for one in stale)
        self._counts.update({"answers": len(stale), "late": late, "lost": self._lost})
        self._counts["stale rounds"] += sum(stale)
        return {
            SECONDS: self.clock,
            "late-clients": late,
            "late-bytes": self._lost * self._bytes,
            "staleness": sum(stale) / len(stale),
        }

    def _in_words(self) -> str:
        counts = self._counts
        mean = counts["stale rounds"] / max(1, counts["answers"])
        lost = f", and {counts['lost']} clients did not answer" if counts["lost"] else ""
        return (
            f"{counts['late']} of {counts['answers']} answers were to parameters of earlier rounds,"
            f" on average {mean:.3g} rounds old{lost}."
        )

    def _refuse_lost(self, buffer: int) -> None:
        """Refuse devices that hardly ever answer before they go."""
        if self._lost > _MOST_LOST * buffer:
            raise ExperimentError(
                "hardly any device answers before it becomes unavailable",
                expected=f"at least one answer of {_MOST_LOST} clients",
                got=f"{self._lost} clients that did not answer in one round",
                fix="set shorter times of devices, or more hours in devices.nightly",
            )

    def _refuse_small(self, clients: int, buffer: int) -> None:
        """Refuse more clients at a time than there are, beside those in the buffer."""
        most = clients - buffer + 1
        if self.config.concurrency > max(most, buffer):
            raise ExperimentError(
                "wrong value for 'asynchronous.concurrency'",
                expected=f"at most {most}: the {clients} clients without those whose answers are in"
                " the buffer",
                got=str(self.config.concurrency),
                fix="set a smaller number, or a smaller sampler.cohort",
            )
