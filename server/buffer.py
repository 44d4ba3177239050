# SPDX-License-Identifier: Apache-2.0
"""Buffered asynchronous aggregation on simulated devices (FedBuff): buffer, stale answers, and
settings."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedrec.components import registry
from fedrec.devices import DevicesConfig
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.experiment.tables import AsynchronousConfig
from fedrec.privacy.personal import PersonalNoise
from fedrec.protocol.serialization import to_record, zero_copy_arrays
from fedrec.runtime.ragged import strip_prefix
from server.cohort import SampledCohorts
from server.devices import SECONDS, Starters, SynchronousTimeline, Timeline, refuse_small
from strategies.base import CohortStrategy, GeneratingStrategy, Part


class StartingParameters(dict[int, dict[str, np.ndarray]]):
    """Parameters that clients started from, by the number of rounds that made them.

    Args:
        exponent: an answer to parameters of s rounds ago has weight (1 + s)^-exponent.
    """

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def keep(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy parameters, which the next round may change in place."""
        self[version] = {name: np.array(value) for name, value in arrays.items()}

    def forget_others(self, needed: Collection[int]) -> None:
        """Keep these versions alone."""
        for version in self.keys() - set(needed):
            del self[version]

    def part(self, version: int, clients: np.ndarray, round_number: int) -> Part:
        """The part of a round whose clients `int64 [n]` started from a version.

        Args:
            version: number of rounds that made their parameters.
            clients: the clients.
            round_number: the round in which they answer.
        """
        weight = (round_number - version) ** -self._exponent
        return Part(clients, to_record(self[version]), weight)


def stale_columns(stale: Sequence[int], counts: Counter[str]) -> dict[str, Any]:
    """Columns of a round, which is added to the counts of the run.

    Args:
        stale: how many rounds old the parameters of each client's answer are.
        counts: of `answers`, of `late` ones, and of their `stale rounds` in all.
    """
    late = sum(one > 0 for one in stale)
    counts.update({"answers": len(stale), "late": late})
    counts["stale rounds"] += sum(stale)
    return {"late-clients": late, "staleness": sum(stale) / max(1, len(stale))}


def stale_words(counts: Counter[str]) -> str:
    """The counts of `stale_columns` in words."""
    mean = counts["stale rounds"] / max(1, counts["answers"])
    return (
        f"{counts['late']} of {counts['answers']} answers were to parameters of earlier rounds, on"
        f" average {mean:.3g} rounds old"
    )


# Buffered asynchronous aggregation on simulated devices (FedBuff, Nguyen et al. 2022, algorithm 1).
#
# `concurrency` clients train at a time, each from the parameters that it was sent. A round ends,
# and the server takes a step, when the buffer has as many answers as the sampler's cohort has
# clients. A client that has answered or is lost is replaced at once; the next clients are those
# that the sampler draws, one cohort after the other. So with a concurrency of one cohort and
# equally fast devices, each round is the synchronous one.
#
# An answer to parameters of s rounds ago enters the sum with weight 1 / sqrt(1 + s), and the sum is
# divided as in a synchronous round: by the number of clients, or the weight of their examples.
#
# Differs from the paper: nobody is in two places at a time, nor twice in one buffer, so that a
# client moves a step by no more than one update; answers that come at the same time are ordered by
# client; and a client is trained when its answer is taken, with the random stream and the step's
# settings of that round.

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
        self.versions = StartingParameters(asynchronous.staleness_exponent)
        self._queue: list[InFlight] = []
        self._starters = Starters()
        self._answers: list[InFlight] = []
        self._ended = 0.0
        self._lost = 0

    def announce(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """Nothing; keeps the first parameters."""
        if not self.versions:
            self.versions.keep(0, theta)
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
            if version == round_number - 1:
                found[""] = Part(own, arrays)
            else:
                found[str(version)] = self.versions.part(version, own, round_number)
        return found

    def memory(self) -> dict[str, np.ndarray]:
        """Time and totals, the queue, who starts next, and the parameters of those in the queue."""
        queue = sorted(self._queue)
        own = {
            **self._starters.memory(),
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
        self._starters.restore(memory)
        columns = (memory[f"queue/{name}"].tolist() for name in InFlight._fields)
        self._queue = [InFlight(*row) for row in zip(*columns, strict=True)]
        self.versions.clear()
        for key, value in strip_prefix("version/", memory).items():
            version, _, name = key.partition("/")
            self.versions.setdefault(int(version), {})[name] = value

    def _plan(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        buffer = int(cohorts.section.options["cohort"])
        refuse_small(len(cohorts.clients), buffer, self.config.concurrency)
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
        free = self.config.concurrency - len(self._queue)
        clients = self._starters.start(free, cohorts, busy, partial(self._present, at=now))
        ends, lost = self._ends(clients, now)
        starting = zip(ends.tolist(), clients.tolist(), lost.tolist(), strict=True)
        for end, client, gone in starting:
            heapq.heappush(self._queue, InFlight(end, client, round_number - 1, gone))
        return now

    def _complete(self, round_number: int, arrays: ArrayRecord) -> dict[str, Any]:
        self.clock = self._ended
        stale = [round_number - 1 - one.version for one in self._answers]
        self.versions.forget_others({one.version for one in self._queue})
        self.versions.keep(round_number, zero_copy_arrays(arrays))
        columns = stale_columns(stale, self._counts)
        self._counts["lost"] += self._lost
        return {SECONDS: self.clock, **columns, "late-bytes": self._lost * self._bytes}

    def _in_words(self) -> str:
        lost = self._counts["lost"]
        return stale_words(self._counts) + (
            f", and {lost} clients did not answer." if lost else "."
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


# The simulated time of an experiment, and what its tables of late devices do not fit.


def timeline_of(experiment: Experiment, strategy: Strategy) -> Timeline | None:
    """The time of a simulation, which decides who takes part in its rounds; None: none is
    simulated.

    Raises:
        ExperimentError: rounds close early and no time is simulated, or the strategy or step does
            not fit.
    """
    refuse_personal(experiment)
    if experiment.devices is None:
        _refuse_without_time(experiment)
        return None
    parts = parts_of(strategy, "devices")
    if experiment.asynchronous is None:
        return SynchronousTimeline(experiment, experiment.devices)
    found = BufferedTimeline(experiment, experiment.devices, experiment.asynchronous)
    weighted_part(parts).staleness = found
    return found


def parts_of(strategy: Strategy, table: str) -> list[CohortStrategy]:
    """The strategies that send orders.

    Args:
        strategy: that of the experiment.
        table: the table that needs them.

    Raises:
        ExperimentError: one of them does not send the global parameters to clients by name.
    """
    found = list(strategy.by_phase.values()) if isinstance(strategy, CohortStrategy) else []
    if not found or any(isinstance(part, GeneratingStrategy) for part in found):
        raise ExperimentError(
            f"strategy {type(strategy).__name__!r} does not work with [{table}]",
            expected="a strategy of fedrec's that sends the global parameters to its clients",
            got="one of Flower's, or one that makes parameters for each client",
            fix=f"set strategy.name = 'reptile', or leave out [{table}]",
        )
    return found


def weighted_part(parts: list[CohortStrategy]) -> CohortStrategy:
    """The strategy whose stale answers are weighted.

    Raises:
        ExperimentError: it needs more of them than their weighted sum, or there are several.
    """
    if len(parts) > 1 or not parts[0].uses_only_sums():
        raise ExperimentError(
            f"strategy {type(parts[0]).__name__!r} does not work with [asynchronous]",
            expected="a strategy without phases that uses the sum of its clients' updates alone",
            got=f"{len(parts)} phases" if len(parts) > 1 else "one that aggregates by itself",
            fix="set strategy.name = 'reptile' or 'fed-adam', or leave out [asynchronous]",
        )
    return parts[0]


def refuse_personal(experiment: Experiment) -> None:
    """Refuse budgets of single users, which count those who are asked, where more are asked than
    answer."""
    known = experiment.lateness.known_cohorts
    if known and isinstance(experiment.settings(registry.STEP), PersonalNoise):
        raise ExperimentError(
            "users' own budgets count the rounds in which they are asked, and late devices upload"
            " in others",
            expected="no [closing], [asynchronous] or availability beside users' own noise",
            got=f"step {experiment.step.name!r}",
            fix="leave these tables out, or choose a step without users' own noise",
        )


def _refuse_without_time(experiment: Experiment) -> None:
    table = "closing" if experiment.closing is not None else "asynchronous"
    if experiment.lateness.leaves_late:
        raise ExperimentError(
            f"[{table}] needs the time at which devices answer",
            expected="[devices] in a simulation"
            + (", or real nodes" if table == "closing" else ""),
            got="a simulation without simulated time",
            fix="add [devices], such as --set 'devices={}'",
        )
