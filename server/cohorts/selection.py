# SPDX-License-Identifier: Apache-2.0
"""The cohort of each round: a sampler over the known clients, as strategies see it
(`strategies.base.Cohorts`). On simulated devices, their speed and availability decide who of those
that it draws takes part (`server.devices`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from flwr.serverapp import Grid

from fedrec.components.errors import component_errors, refuse_wrong
from fedrec.components.registry import SAMPLER
from fedrec.errors import EngineError, ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import Section, component_of
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.privacy.noise_source import secure_fixed_size, secure_poisson
from fedrec.protocol.client_arrays import ItemRequests
from fedrec.protocol.orders import Presence
from fedrec.rng import stream
from server.cohorts.roster import Roster
from server.exchange.item_requests import request_items
from server.samplers.base import Sampler


class WhoAnswers(Protocol):
    """Decides which of the clients that a sampler draws take part in a round."""

    def cohort(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        """Those whose answers count, `int64 [clients]`, ascending; the same at each call until the
        round is complete."""
        ...


class SampledCohorts:
    """The cohort of a round and its nodes: a sampler over the training clients of a roster.

    Args:
        experiment: the experiment.
        roster: the nodes and their clients.
        clients: `int64 [clients]`, ascending: the clients that may be drawn; None: all training
            clients.
        sampler: name and settings of the sampler; None: those of the experiment.
        grid: connection to the nodes; None: item requests are not possible.
    """

    def __init__(
        self,
        experiment: Experiment,
        roster: Roster,
        clients: np.ndarray | None = None,
        sampler: Section | None = None,
        grid: Grid | None = None,
    ) -> None:
        self.experiment = experiment
        self.roster = roster
        self.grid = grid
        self._everybody = clients is None
        self.section = experiment.sampler if sampler is None else sampler
        self._parts: list[SampledCohorts] = []
        self._who_answers: WhoAnswers | None = None
        self._draw_from(roster.training if clients is None else clients)

    @classmethod
    def without_nodes(cls, experiment: Experiment, clients: np.ndarray) -> SampledCohorts:
        """Cohorts of these training clients, `int64 [clients]`, ascending, as if one node had them
        all."""
        return cls(experiment, Roster((0,), (Presence(0, clients, clients[:0]),)))

    def _draw_from(self, clients: np.ndarray) -> None:
        self.clients = clients
        self.sampler = self._sampler_of(clients)

    def _sampler_of(self, clients: np.ndarray) -> Sampler:
        mine = clients.view()
        mine.setflags(write=False)
        return component_of(SAMPLER, self._asked(), mine, self.experiment.seed)

    def _asked(self) -> Section:
        """The sampler with a larger cohort if more clients are asked than are needed.

        Raises:
            ExperimentError: it has no cohort.
        """
        closing = self.experiment.closing
        if closing is None or closing.over_selection == 1:
            return self.section
        options = self.section.options
        if "cohort" not in options:
            raise ExperimentError(
                f"the sampler {self.section.name!r} has no cohort, of which more could be asked",
                expected="a sampler with a setting 'cohort'",
                got=f"closing.over-selection = {closing.over_selection:g}",
                fix="set sampler.name = 'fixed-size', or leave out closing.over-selection",
            )
        more = {**options, "cohort": closing.asked(options["cohort"])}
        return Section.model_validate({"name": self.section.name, **more})

    def follow(self, who_answers: WhoAnswers) -> None:
        """From now on, `sample` leaves out those who do not take part."""
        self._who_answers = who_answers
        for part in self._parts:
            part.follow(who_answers)

    def joined(self, roster: Roster) -> None:
        """Add clients that joined; cohorts over a part of the clients keep that part."""
        self.roster = roster
        if self._everybody:
            self._draw_from(roster.training)
        for part in self._parts:
            part.joined(roster)

    @property
    def schedule(self) -> Scheduled | None:
        """What the sampler guarantees of the rounds of each client; None: nothing. If devices
        decide who takes part, a client whose turn it is may be known to."""
        own = self.sampler.schedule
        if own is None or not self.experiment.lateness.known_cohorts:
            return own
        return replace(own, rate=1.0, joining=True)

    def by_node(self, clients: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """A cohort `int64 [n]` grouped by the node that trains it, in node order."""
        return self.roster.for_training(clients)

    def among(self, clients: np.ndarray, sampler: Section | None = None) -> SampledCohorts:
        """Cohorts of some clients `int64 [n]` only, drawn by the same sampler or by another."""
        chosen = self.section if sampler is None else sampler
        part = SampledCohorts(self.experiment, self.roster, clients, chosen, self.grid)
        part._who_answers = self._who_answers
        self._parts.append(part)
        return part

    def item_requests(
        self, groups: Mapping[int, np.ndarray], round_number: int
    ) -> dict[int, ItemRequests]:
        """By node, the items that its clients touch in a round; asked of the nodes, and without
        those that failed."""
        if self.grid is None:
            raise EngineError(
                "the cohorts have no grid to ask nodes with",
                expected="cohorts with a grid",
                got="cohorts without one",
                fix="give SampledCohorts the grid of the run",
            )
        step = {"name": self.experiment.step.name, **self.experiment.step.options}
        return request_items(self.grid, self.experiment.engine, groups, round_number, "train", step)

    def draw(self, name: str, share: float) -> np.ndarray:
        """A share of the clients in (0, 1], at least one, `int64 [clients]`, ascending; a function
        of the seed and the name."""
        count = min(len(self.clients), max(1, round(share * len(self.clients))))
        return np.sort(
            stream(self.experiment.seed, name).choice(self.clients, size=count, replace=False)
        )

    def sample(self, round_number: int) -> np.ndarray:
        """The cohort of a round, `int64 [clients]`, ascending."""
        if self._who_answers is not None:
            return self._who_answers.cohort(round_number, self)
        return self.drawn(round_number)

    def drawn(self, round_number: int, present: np.ndarray | None = None) -> np.ndarray:
        """The clients that are asked in a round, `int64 [clients]`, ascending; in secure mode drawn
        anew at each call, from the operating system's generator, unless they may be known.

        Args:
            round_number: the round, from 1.
            present: `int64 [clients]`, ascending: draw from these; default: from all.
        """
        schedule = self.schedule
        known = self.experiment.lateness.known_cohorts or (
            schedule is not None and schedule.rate == 1
        )
        if not self.experiment.hides_cohorts or known:
            doing = f"in round {round_number}"
            sampler = self.sampler if present is None else self._sampler_of(present)
            with component_errors(SAMPLER.name, sampler, doing):
                cohort = sampler.sample(round_number)
                _refuse_no_cohort(sampler, cohort, self.clients, doing)
                return cohort
        if schedule is not None:
            return secure_poisson(self.sampler.eligible(round_number), schedule.rate)
        if self.section.name == "full":
            return self.clients
        cohort = self.section.options["cohort"]
        if self.section.name == "poisson":
            return secure_poisson(self.clients, cohort / len(self.clients))
        return secure_fixed_size(self.clients, int(cohort))


def _refuse_no_cohort(sampler: Sampler, cohort: object, clients: np.ndarray, doing: str) -> None:
    """Refuse a cohort that is not an ascending subset of the clients."""
    expected = "int64 ids of some of the clients, ascending and distinct"
    if not isinstance(cohort, np.ndarray) or cohort.ndim != 1 or cohort.dtype != np.int64:
        shown = (
            f"{cohort.dtype} {list(cohort.shape)}"
            if isinstance(cohort, np.ndarray)
            else type(cohort).__name__
        )
        refuse_wrong(SAMPLER.name, sampler, doing, expected=expected, got=shown)
    elif len(cohort) and ((np.diff(cohort) <= 0).any() or not np.isin(cohort, clients).all()):
        refuse_wrong(
            SAMPLER.name, sampler, doing, expected=expected, got=f"{cohort[:10].tolist()}..."
        )
