# SPDX-License-Identifier: Apache-2.0
"""The cohort of a round: the roster, the selection, and the balance between nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedrec.components.registry import SAMPLER
from fedrec.components.sections import Section, component_errors, component_of, refuse_wrong
from fedrec.errors import EngineError, ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.protocol.client_arrays import ItemRequests
from fedrec.protocol.messages import HELLO, unpack_presence
from fedrec.protocol.orders import Presence
from fedrec.rng import secure_fixed_size, secure_poisson
from fedrec.runtime.ragged import distinct
from server.exchange import answers, request_items
from server.samplers import Sampler

# Balances a cohort's work between nodes that can train any of its clients. A round takes as long as
# its slowest node. A node trains its clients in blocks, those with the most work first; the time of
# a block grows with the steps of its longest client, with the work of all its clients, and with
# their number. The constants are those of compiled code that takes all steps of a client at once,
# where the first term is small.

_BLOCK = 32  # clients that are trained together
_LEADS = 6  # number of groupings of long clients to try
# fixed cost of a client, in examples (measured on a CPU)
_CLIENT_COST = 40
# fixed cost of a step of a block, in units of the cost per client in it (measured on a CPU)
_STEP_COST = 0.1


def balanced(work: np.ndarray, nodes: int) -> list[np.ndarray]:
    """Balance clients between nodes, so that all nodes end at about the same time.

    Args:
        work: `[clients]`, number of examples of each.
        nodes: number of nodes.

    Returns:
        Indices in `work` of each node's clients, `int64 [n]`, ascending; a function of the
        arguments alone.
    """
    order = np.argsort(-work, kind="stable").tolist()
    # With few blocks it can be faster to keep the long clients together, because the other blocks
    # then finish early.
    leads = _LEADS if len(order) <= nodes * _BLOCK else 1
    plans = [_shared_out(order, work.tolist(), nodes, lead) for lead in range(1, leads + 1)]
    _, shares = min(plans, key=lambda plan: plan[0])
    return [np.sort(np.array(share, dtype=np.int64)) for share in shares]


def _shared_out(
    order: list[int], work: list[float], nodes: int, lead: int
) -> tuple[float, list[list[int]]]:
    """Assign the longest `lead` clients to the first node, and each other client to the node that
    ends first; also returns the time of the slowest node."""
    shares: list[list[int]] = [[] for _ in range(nodes)]
    costs = [0.0] * nodes
    for rank, client in enumerate(order):
        ends = [
            cost
            + _CLIENT_COST
            + work[client] * (1 + (_STEP_COST if len(share) % _BLOCK == 0 else 0.0))
            for cost, share in zip(costs, shares, strict=True)
        ]
        node = 0 if rank < lead else ends.index(min(ends))
        costs[node] = ends[node]
        shares[node].append(client)
    return max(costs), shares


# The clients of a federation, and the node that hosts each.
#
# Flower's node ids are random numbers, so the server asks every node once which clients it hosts.
# Nodes are ordered by the partition that they report, which makes sums and results independent of
# Flower's ids.


@dataclass(frozen=True, eq=False)
class Roster:
    """Nodes of a federation, and their clients.

    Attributes:
        nodes: Flower's node ids, in the order of the nodes' partitions.
        presences: the reply of each, in the same order.
    """

    nodes: tuple[int, ...]
    presences: tuple[Presence, ...]

    @cached_property
    def training(self) -> np.ndarray:
        """Clients that may be sampled for training, `int64 [clients]`, ascending."""
        return np.sort(_joined(presence.training for presence in self.presences))

    @cached_property
    def evaluated(self) -> np.ndarray:
        """Clients with held-out rows, `int64 [clients]`, ascending."""
        return np.sort(_joined(presence.evaluated for presence in self.presences))

    @cached_property
    def validated(self) -> np.ndarray:
        """Clients with validation rows, as reported by the nodes, `int64 [clients]`, ascending."""
        return np.sort(_joined(p.validated for p in self.presences if p.validated is not None))

    def by_node(self, clients: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Group clients, any integers, by the node that hosts them: (node id, `int64 [clients]`),
        in node order, without empty groups and clients that no node hosts."""
        ids, hosts = self._hosts
        if not len(ids):
            return
        ranks = np.minimum(np.searchsorted(ids, clients), len(ids) - 1)
        hosted = ids[ranks] == clients
        for index, node in enumerate(self.nodes):
            group = clients[hosted & (hosts[ranks] == index)]
            if len(group):
                yield node, group

    def for_training(self, clients: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Group clients `int64 [n]` by the node that trains them: their host, or any node if all
        nodes report that they can train every client."""
        if self._work is None:
            yield from self.by_node(clients)
            return
        work = self._work[np.searchsorted(self.training, clients)]
        for node, share in zip(self.nodes, balanced(work, len(self.nodes)), strict=True):
            if len(share):
                yield node, clients[share]

    @cached_property
    def _work(self) -> np.ndarray | None:
        """Training rows of each client in `training`; None unless every node reports it."""
        work = [presence.work for presence in self.presences if presence.work is not None]
        if len(work) < len(self.presences):
            return None
        order = np.argsort(np.concatenate([presence.training for presence in self.presences]))
        return np.concatenate(work)[order]

    @cached_property
    def _hosts(self) -> tuple[np.ndarray, np.ndarray]:
        """All ids, ascending, and the index of the node that hosts each (the last of several)."""
        hosted = [_hosted_by(presence) for presence in self.presences]
        ids = _joined(hosted)[::-1]
        hosts = _joined(np.full(len(part), index) for index, part in enumerate(hosted))[::-1]
        distinct, first = np.unique(ids, return_index=True)
        return distinct, hosts[first]


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenate arrays, possibly none, to `int64 [n]`."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _hosted_by(presence: Presence) -> np.ndarray:
    reported = (presence.training, presence.evaluated, presence.validated)
    return distinct(np.concatenate([clients for clients in reported if clients is not None]))


def call_roster(grid: Grid, *, timeout: float) -> Roster:
    """Ask every node of the grid which clients it hosts.

    Raises:
        EngineError: the grid has no node, a node failed to reply, or two nodes report the same
            partition.
        ClientError: a node could not read its data.
    """
    nodes = list(grid.get_node_ids())
    messages = [Message(RecordDict(), node, HELLO) for node in nodes]
    replies = answers(
        grid.send_and_receive(messages, timeout=timeout), sent=nodes, max_failures=0.0
    )
    hosts = sorted(
        ((unpack_presence(reply.content), reply.metadata.src_node_id) for reply in replies),
        key=lambda pair: pair[0].partition,
    )
    partitions = [presence.partition for presence, _ in hosts]
    if not hosts or len(set(partitions)) != len(partitions):
        raise EngineError(
            "the nodes do not form a federation",
            got=f"partition-ids {partitions}",
            fix="give every node its own partition-id in its node configuration",
        )
    return Roster(tuple(node for _, node in hosts), tuple(presence for presence, _ in hosts))


# The cohort of each round: a sampler over the known clients, as strategies see it
# (`strategies.base.Cohorts`). On simulated devices, speed and availability decide which of the
# drawn clients take part (`server.devices`).


class _WhoAnswers(Protocol):
    """Selection of the drawn clients that take part in a round."""

    def cohort(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        """Clients whose replies count, `int64 [clients]`, ascending; the same at each call until
        the round is complete."""
        ...

    def groups(self, clients: np.ndarray) -> Iterable[np.ndarray]:
        """Group the clients of a round, `int64 [clients]`; each group gets a message."""
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
        self._who_answers: _WhoAnswers | None = None
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

    def follow(self, who_answers: _WhoAnswers) -> None:
        """Exclude from `sample` the clients that do not take part, from now on."""
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
        """Participation bound that the sampler guarantees; None: none. If devices decide who takes
        part, participation may be known."""
        schedule = self.sampler.schedule
        if schedule is None or not self.experiment.known_cohorts:
            return schedule
        return replace(schedule, joining=True)

    def by_node(self, clients: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """Group a cohort `int64 [n]` by the node that trains it, in node order; a node has several
        groups if its clients start from several parameters."""
        groups = [clients] if self._who_answers is None else self._who_answers.groups(clients)
        for group in groups:
            yield from self.roster.for_training(group)

    def among(self, clients: np.ndarray, sampler: Section | None = None) -> SampledCohorts:
        """Make cohorts of some clients `int64 [n]`, drawn by the same sampler or another."""
        chosen = self.section if sampler is None else sampler
        part = SampledCohorts(self.experiment, self.roster, clients, chosen, self.grid)
        part._who_answers = self._who_answers
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
        if self._who_answers is not None:
            return self._who_answers.cohort(round_number, self)
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
