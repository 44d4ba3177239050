# SPDX-License-Identifier: Apache-2.0
"""The cohort of each round: a sampler over the known clients, as strategies see it
(`strategies.base.Cohorts`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from flwr.serverapp import Grid

from fedrec.components.errors import component_errors, refuse_wrong
from fedrec.components.registry import SAMPLER, resolve
from fedrec.errors import EngineError
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import Section, component_settings
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.privacy.noise_source import secure_fixed_size, secure_poisson
from fedrec.protocol.client_arrays import ItemRequests
from fedrec.protocol.orders import Presence
from fedrec.rng import stream
from server.cohorts.roster import Roster
from server.exchange.item_requests import request_items
from server.samplers.base import Sampler


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
        self._draw_from(roster.training if clients is None else clients)

    @classmethod
    def without_nodes(cls, experiment: Experiment, clients: np.ndarray) -> SampledCohorts:
        """Cohorts of these training clients, `int64 [clients]`, ascending, as if one node had them
        all."""
        return cls(experiment, Roster((0,), (Presence(0, clients, clients[:0]),)))

    def _draw_from(self, clients: np.ndarray) -> None:
        self.clients = clients
        settings = component_settings(SAMPLER, self.section)
        sampler_class = resolve(SAMPLER, self.section.name)
        mine = clients.view()
        mine.setflags(write=False)
        with component_errors(SAMPLER.name, sampler_class, "when it was made"):
            self.sampler = sampler_class(settings, mine, self.experiment.seed)

    def joined(self, roster: Roster) -> None:
        """Add clients that joined; cohorts over a part of the clients keep that part."""
        self.roster = roster
        if self._everybody:
            self._draw_from(roster.training)
        for part in self._parts:
            part.joined(roster)

    @property
    def schedule(self) -> Scheduled | None:
        """What the sampler guarantees of the rounds of each client; None: nothing."""
        return self.sampler.schedule

    def by_node(self, clients: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """A cohort `int64 [n]` grouped by the node that trains it, in node order."""
        return self.roster.for_training(clients)

    def among(self, clients: np.ndarray, sampler: Section | None = None) -> SampledCohorts:
        """Cohorts of some clients `int64 [n]` only, drawn by the same sampler or by another."""
        chosen = self.section if sampler is None else sampler
        part = SampledCohorts(self.experiment, self.roster, clients, chosen, self.grid)
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
        """The cohort of a round, `int64 [clients]`, ascending; in secure mode drawn anew at each
        call, from the operating system's generator, unless it may be known."""
        privacy = self.experiment.privacy
        schedule = self.schedule
        known = schedule is not None and schedule.rate == 1
        if privacy is None or privacy.mode != "secure" or known:
            doing = f"in round {round_number}"
            with component_errors(SAMPLER.name, self.sampler, doing):
                cohort = self.sampler.sample(round_number)
                _refuse_no_cohort(self.sampler, cohort, self.clients, doing)
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
