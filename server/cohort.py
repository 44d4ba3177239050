# SPDX-License-Identifier: Apache-2.0
"""The cohort of each round: drawn by the sampler, without clients whose devices are late."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedrec.components.registry import SAMPLER
from fedrec.components.sections import Section, component_errors, component_of, refuse_wrong
from fedrec.data.population import POPULATIONS
from fedrec.devices import Devices, DevicesConfig
from fedrec.errors import EngineError, ExperimentError
from fedrec.experiment.schema import ClosingConfig, Experiment
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.protocol.messages import Presence
from fedrec.protocol.updates import ItemRequests
from fedrec.rng import secure_fixed_size, secure_poisson
from fedrec.runtime.files import parse_json
from server.checkpoint import RunExtension
from server.nodes import Roster, request_items
from server.samplers import Sampler

# The cohort of each round: a sampler over the known clients, as strategies see it
# (`strategies.base.Cohorts`). On simulated devices, speed and availability decide which of the
# drawn clients take part.


class SampledCohorts:
    """The cohort of a round and its nodes: a sampler over the training clients of a roster.

    Args:
        experiment: the experiment.
        roster: the nodes and their clients.
        clients: `int64 [clients]`, ascending: the clients that may be drawn; None: all training
            clients.
        sampler: name and settings of the sampler; None: those of the experiment.
        grid: connection to the nodes; None: item requests are not possible.
        timeline: excludes the clients that do not take part; None: all drawn ones do.
    """

    def __init__(
        self,
        experiment: Experiment,
        roster: Roster,
        clients: np.ndarray | None = None,
        sampler: Section | None = None,
        grid: Grid | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.experiment = experiment
        self.roster = roster
        self.grid = grid
        self._everybody = clients is None
        self.section = experiment.sampler if sampler is None else sampler
        self._parts: list[SampledCohorts] = []
        self._timeline = timeline
        self._draw_from(roster.training if clients is None else clients)

    @classmethod
    def without_nodes(cls, experiment: Experiment, clients: np.ndarray) -> SampledCohorts:
        """Make cohorts of these training clients, `int64 [clients]`, ascending, without nodes."""
        return cls(experiment, Roster((0,), (Presence(0, clients, clients[:0]),)))

    def _draw_from(self, clients: np.ndarray) -> None:
        self.clients = clients
        self.sampler = self._sampler_of(clients)

    def _sampler_of(self, clients: np.ndarray) -> Sampler:
        mine = clients.view()
        mine.setflags(write=False)
        return component_of(SAMPLER, self._asked(), mine, self.experiment.seed)

    def _asked(self) -> Section:
        """Sampler with a larger cohort, for over-selection.

        Raises:
            ExperimentError: the sampler has no cohort.
        """
        closing = self.experiment.closing
        if closing is None or closing.over_selection == 1:
            return self.section
        options = self.section.options
        if "cohort" not in options:
            raise ExperimentError(
                f"over-selection needs a cohort, and the sampler {self.section.name!r} has none",
                fix="set sampler.name = 'fixed-size', or leave out closing.over-selection",
            )
        more = {**options, "cohort": closing.asked(options["cohort"])}
        return Section.model_validate({"name": self.section.name, **more})

    def joined(self, roster: Roster) -> None:
        """Add clients that joined; cohorts over a part of the clients keep that part."""
        self.roster = roster
        if self._everybody:
            self._draw_from(roster.training)
        for part in self._parts:
            part.joined(roster)

    @property
    def schedule(self) -> Scheduled | None:
        """Participation bound that the sampler guarantees; None: none. If devices decide who takes
        part, participation may be known."""
        schedule = self.sampler.schedule
        if schedule is None or not self.experiment.known_cohorts:
            return schedule
        return replace(schedule, joining=True)

    def by_node(self, clients: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """Group a cohort `int64 [n]` by the node that trains it, in node order; a node has several
        groups if its clients start from several parameters."""
        groups = [clients] if self._timeline is None else self._timeline.groups(clients)
        for group in groups:
            yield from self.roster.for_training(group)

    def among(self, clients: np.ndarray, sampler: Section | None = None) -> SampledCohorts:
        """Make cohorts of some clients `int64 [n]`, drawn by the same sampler or another."""
        chosen = self.section if sampler is None else sampler
        part = SampledCohorts(
            self.experiment, self.roster, clients, chosen, self.grid, self._timeline
        )
        self._parts.append(part)
        return part

    def item_requests(
        self, groups: Mapping[int, np.ndarray], round_number: int
    ) -> dict[int, ItemRequests]:
        """Request the items that clients touch in a round, by node, without nodes that failed."""
        if self.grid is None:
            raise EngineError(
                "item requests need a grid, and the cohorts have none",
                fix="give SampledCohorts the grid of the run",
            )
        step = {"name": self.experiment.step.name, **self.experiment.step.options}
        return request_items(self.grid, self.experiment.engine, groups, round_number, "train", step)

    def sample(self, round_number: int) -> np.ndarray:
        """Cohort of a round, `int64 [clients]`, ascending."""
        if self._timeline is not None:
            return self._timeline.cohort(round_number, self)
        return self.drawn(round_number)

    def drawn(self, round_number: int, present: np.ndarray | None = None) -> np.ndarray:
        """Draw the clients to train in a round, `int64 [clients]`, ascending; in secure mode anew
        at each call, from the operating system's generator, unless they may be known.

        Args:
            round_number: the round, from 1.
            present: `int64 [clients]`, ascending: draw from these; default: from all.
        """
        known = self.experiment.known_cohorts or self.schedule is not None
        if not self.experiment.hides_cohorts or known:
            doing = f"in round {round_number}"
            sampler = self.sampler if present is None else self._sampler_of(present)
            with component_errors(SAMPLER.name, sampler, doing):
                cohort = sampler.sample(round_number)
                _check_cohort(sampler, cohort, self.clients, doing)
                return cohort
        if self.section.name == "full":
            return self.clients
        cohort = self.section.options["cohort"]
        if self.section.name == "poisson":
            return secure_poisson(self.clients, cohort / len(self.clients))
        return secure_fixed_size(self.clients, int(cohort))


def _check_cohort(sampler: Sampler, cohort: object, clients: np.ndarray, doing: str) -> None:
    """Check that a cohort is an ascending subset of the clients."""
    if not isinstance(cohort, np.ndarray):
        got = type(cohort).__name__
    elif cohort.ndim != 1 or cohort.dtype != np.int64:
        got = f"{cohort.dtype} {list(cohort.shape)}"
    elif (np.diff(cohort) <= 0).any() or not np.isin(cohort, clients).all():
        got = f"{cohort[:10].tolist()}..."
    else:
        return
    expected = "int64 ids of some of the clients, ascending and distinct"
    refuse_wrong(SAMPLER.name, sampler, doing, expected=expected, got=got)


# Availability and lateness of simulated devices, applied after sampling.

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
