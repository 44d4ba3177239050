# SPDX-License-Identifier: Apache-2.0
"""Flower strategies that train a cohort of clients per round, and the checks of a strategy.

A round: the sampler draws the cohort, the cohort is grouped by node, every node gets one message
(all messages share the parameters) and replies with one sum. The sums are added in node order, and
the rule of the subclass applies them. A strategy with `reply = "each"` gets the update of each
client instead, such as a median needs.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from pydantic import Field

from fedrec.components.errors import component_errors, finite, named, refuse_other_arrays
from fedrec.components.registry import STRATEGY
from fedrec.config import Config
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.phases import MAIN, Phase, phase_at
from fedrec.experiment.sections import Section
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.messages import pack_train, unpack_each, unpack_sum
from fedrec.protocol.orders import Reply, TrainEach, TrainOrder, TrainSum, Weighting
from fedrec.protocol.serialization import to_record, zero_copy_arrays
from fedrec.protocol.updates import (
    Change,
    SparseUpdate,
    added,
    apply_changes,
    dense_change,
    network_bytes,
    scaled,
)
from fedrec.runtime.ragged import add_prefix, strip_prefix
from strategies.dp import DpFedAvg

# A server learning rate that may decay over the rounds.


class ServerRate(Config):
    """Settings of strategies with a server learning rate."""

    server_lr: float = Field(default=1.0, gt=0)
    """Server learning rate."""
    anneal_rounds: int | None = Field(default=None, ge=1)
    """Number of rounds T over which the server rate falls linearly to zero: `server-lr * (1 - (t -
    1) / T)` in round t, and 0 after T."""
    anneal_after: int = Field(default=0, ge=0)
    """Rounds at the full rate before it begins to fall, such as those of an earlier phase; rounds
    are counted from the experiment's first."""

    def rate(self, round_number: int) -> float:
        """The server rate of a round, from 1."""
        if self.anneal_rounds is None:
            return self.server_lr
        falling = max(0, round_number - 1 - self.anneal_after)
        return self.server_lr * max(0.0, 1.0 - falling / self.anneal_rounds)


class Cohorts(Protocol):
    """The clients as a strategy sees them: the cohort of each round, and the node of each
    client."""

    clients: np.ndarray
    """`int64 [clients]`, ascending: all clients that may be sampled."""
    section: Section
    """Name and settings of the sampler."""

    @property
    def schedule(self) -> Scheduled | None:
        """What the sampler guarantees of the rounds of each client; None: nothing."""
        ...

    def sample(self, round_number: int) -> np.ndarray:
        """The cohort of a round, `int64 [clients]`, ascending."""
        ...

    def by_node(self, clients: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """A cohort `int64 [n]` grouped by the node that trains it, in node order."""
        ...

    def draw(self, name: str, share: float) -> np.ndarray:
        """A share of the clients in (0, 1], at least one, `int64 [clients]`, ascending; a function
        of the seed and the name."""
        ...

    def item_requests(
        self, groups: Mapping[int, np.ndarray], round_number: int
    ) -> dict[int, ItemRequests]:
        """By node, the items that its clients need in a round, without nodes that failed."""
        ...

    def among(self, clients: np.ndarray, sampler: Section | None = None) -> Cohorts:
        """Cohorts of some clients `int64 [n]` only, drawn by the same sampler or by another."""
        ...


@dataclass(frozen=True, eq=False)
class Part:
    """Clients of a round that start from the same parameters.

    Attributes:
        clients: `int64 [clients]`, ascending.
        arrays: the parameters.
        weight: of their updates in the sum.
    """

    clients: np.ndarray
    arrays: ArrayRecord
    weight: float = 1.0


class Staleness(Protocol):
    """Which of a round's clients start from parameters of earlier rounds."""

    def parts(
        self, round_number: int, clients: np.ndarray, arrays: ArrayRecord
    ) -> Mapping[str, Part]:
        """The cohort of a round, `int64 [clients]`, by the parameters that they start from. The
        present parameters are `arrays`. Keys are texts for the messages."""
        ...


class Memory(Protocol):
    """State between rounds."""

    def state(self) -> Mapping[str, np.ndarray]:
        """The state as named arrays. They are copied, except for those that are not writable and no
        views, which must not change any more."""
        ...

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        ...


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The answers of a round.

    Attributes:
        changes: weighted sum of the updates, per parameter, float64; of a table with few changed
            rows these alone. Empty with `reply = "each"`.
        clients: number of clients in it; under differential privacy the fixed denominator.
        weight: sum of the weights; likewise.
        round: number of the round, from 1.
        each: the updates of the single clients; None unless the strategy asks for them.
    """

    changes: dict[str, Change]
    clients: float
    weight: float
    round: int
    each: TrainEach | None = None

    def total(self, theta: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The sums as whole arrays, float64; `theta` are the parameters at the start of the
        round."""
        return {name: dense_change(change, theta[name]) for name, change in self.changes.items()}

    def added_to(self, theta: Mapping[str, np.ndarray], rate: float) -> dict[str, np.ndarray]:
        """`theta + rate * sum`; may change `theta` in place, see
        `fedrec.protocol.updates.apply_changes`."""
        return apply_changes(theta, self.changes, rate)


class CohortStrategy(Strategy):
    """Base of fedrec's strategies. A subclass says how updates are weighted and how their sum is
    applied, or asks for each of them.

    A built-in has a `name` and lives in `strategies/`, its configuration class above it. State
    that must survive a resumed run is in `memories`, or goes through `state` and `restore`.

    Args:
        config: its settings.
        cohorts: the clients.
        step: name and settings of the local step that the clients run.

    Attributes:
        reply: what nodes reply with: the sum of their clients' updates, or the update of each. With
            `each` there is no secure aggregation, and no user-level guarantee by `[privacy]`.
        sees: with `each`, what its server sees, in words.
        instead: with `each`, what the user can do in place of `[privacy]`, in words.
        privacy: clip, noise and charge of its rounds; None: no differential privacy.
        watch: told the number of each private round and its noisy mean update, before the rule.
        staleness: which clients start from earlier parameters; None: none do.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""
    reply: ClassVar[Reply] = "sum"
    sees: ClassVar[str] = "reply = 'each': updates that no noise has reached"
    instead: ClassVar[str] = "set strategy.name = 'reptile', or leave out the [privacy] table"
    weighting: Weighting = "uniform"

    def __init__(self, config: Config, cohorts: Cohorts, step: dict[str, Any]) -> None:
        self.config = config
        self.cohorts = cohorts
        self.step = step
        self._round = 0
        self._arrays = to_record({})
        self._theta: dict[str, np.ndarray] = {}
        self._asked: dict[tuple[int, str], int] = {}  # number of clients, by node and part
        self._parts: dict[str, Part] = {}
        self._open: set[int] = set()  # clients of the round that have not answered
        self._whole = 0  # bytes of the shared parameters
        self._down = 0  # bytes to the clients of the round
        self._requested = 0  # bytes of what they asked for before
        self.privacy: DpFedAvg | None = None
        self.watch: Callable[[int, Mapping[str, np.ndarray]], None] | None = None
        self.staleness: Staleness | None = None

    @classmethod
    def server_rate(cls, config: Any, round_number: int) -> float:
        """Factor that multiplies the mean update in a round: the settings' `rate`, else their
        constant `server_lr`, else 1. Accounting and audits use it; a strategy with another scale
        overrides it.

        Args:
            config: settings of this strategy.
            round_number: from 1.
        """
        if isinstance(config, ServerRate):
            return config.rate(round_number)
        return float(getattr(config, "server_lr", 1.0))

    def protect(self, privacy: DpFedAvg) -> None:
        """Make the rounds of this strategy differentially private.

        Raises:
            ExperimentError: clients do not all count the same, or the strategy needs the update of
                each.
        """
        if self.reply == "each":
            raise ExperimentError(
                f"strategy {type(self).__name__!r} cannot be made private by [privacy]",
                expected="a strategy that uses only the sum of the clients' updates",
                got=self.sees,
                fix=self.instead,
            )
        privacy.refuse_unequal(type(self).__name__, self.weighting)
        self.privacy = privacy

    @classmethod
    def uses_only_sums(cls) -> bool:
        """Whether rounds are those of this class: orders to nodes, and a rule that is given the sum
        alone, under differential privacy the noisy one. A class that asks for each update, or with
        messages or an aggregation of its own, reads replies that no noise has reached."""
        if cls.reply == "each":
            return False
        own = cls.configure_train, cls.aggregate_train
        return own == (CohortStrategy.configure_train, CohortStrategy.aggregate_train)

    @classmethod
    def schedule(cls, config: Any, step: Mapping[str, Any]) -> tuple[Phase, ...]:
        """The phases of a strategy with these settings, in order; a single one by default.

        Args:
            config: settings of this class.
            step: name and settings of the experiment's local step.
        """
        return (Phase(MAIN, step),)

    @classmethod
    def remarks(
        cls, config: Any, step: Any, parameters: Mapping[str, np.ndarray], rounds: int
    ) -> list[str]:
        """Remarks to be reported with the results of a run, one paragraph each; none by default.

        Args:
            config: settings of this class.
            step: settings of the experiment's local step.
            parameters: the global parameters.
            rounds: how many there were.
        """
        return []

    @property
    def by_phase(self) -> dict[str, CohortStrategy]:
        """The strategies that send orders and aggregate, by phase. A strategy that contains others
        overrides this to return all of theirs, at any depth; clip and noise are set on these."""
        return {self.phase(1): self}

    @property
    def volunteers(self) -> dict[str, str]:
        """For each phase without noise, a description of the clients who agreed to it and are its
        only participants; empty by default."""
        return {}

    def refuse_misfits(self, theta: Mapping[str, np.ndarray]) -> None:
        """Refuse the initial global parameters, before the first round; all are accepted by
        default.

        Raises:
            ExperimentError: the strategy cannot aggregate updates of these parameters.
        """

    @abstractmethod
    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next global parameters from the present ones and a round's aggregate with at least
        one client.

        `theta` may be changed in place; it is not read afterwards.
        """

    @property
    def memories(self) -> Mapping[str, Memory]:
        """What keeps state between rounds, by the prefix of its arrays' names; nothing by
        default."""
        return {}

    def state(self) -> dict[str, np.ndarray]:
        """State that the strategy keeps between rounds: that of `memories`."""
        return add_prefix({prefix: memory.state() for prefix, memory in self.memories.items()})

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        for prefix, memory in self.memories.items():
            memory.restore(strip_prefix(prefix, state))

    def phase(self, round_number: int) -> str:
        """The phase of training that a round belongs to, as in `schedule`."""
        return phase_at(self._phases, round_number).name

    @functools.cached_property
    def _phases(self) -> tuple[Phase, ...]:
        return type(self).schedule(self.config, self.step)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per node that hosts a member of the round's cohort; several if these start
        from different parameters."""
        self._round = server_round
        self._arrays = arrays
        self._theta = zero_copy_arrays(arrays)
        self._open = set()
        self._whole = network_bytes(self._theta)
        self._down = 0
        self._requested = 0
        cohort = self.cohorts.sample(server_round)
        self._parts = (
            {"": Part(cohort, arrays)}
            if self.staleness is None
            else dict(self.staleness.parts(server_round, cohort, arrays))
        )
        self._asked = {}
        for key, part in self._parts.items():
            yield from self._messages_to(key, part)

    def _messages_to(self, key: str, part: Part) -> Iterator[Message]:
        """The messages to the clients of a part, whose key they carry as Flower's group."""
        protection = None if self.privacy is None else self.privacy.protection(list(self._theta))
        groups = dict(self.cohorts.by_node(part.clients))
        for node, clients, sent in self._sent(self._round, groups, part.arrays):
            self._asked[node, key] = len(clients)
            self._open.update(clients.tolist())  # each may answer once
            if sent is part.arrays:
                self._down += self._whole * len(clients)
            else:
                own = zero_copy_arrays(sent)
                self._down += network_bytes(own)
                self._requested += ItemRequests.read(own).items.nbytes
            each = self.reply == "each"
            order = TrainOrder(
                self._round, clients, self.weighting, self.step, protection=protection, each=each
            )
            yield Message(pack_train(sent, order), node, MessageType.TRAIN, group_id=key)

    def _sent(
        self, server_round: int, groups: Mapping[int, np.ndarray], arrays: ArrayRecord
    ) -> Iterable[tuple[int, np.ndarray, ArrayRecord]]:
        """The nodes of a round, their clients, and the parameters that each gets: the global
        ones."""
        return ((node, clients, arrays) for node, clients in groups.items())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the nodes' sums in node order and apply them; without any client the parameters stay.
        Under differential privacy the sums are applied whichever nodes answered, so that the
        release does not depend on it.
        """
        good = [reply for reply in replies if not reply.has_error()]
        if self.reply == "each":
            return self._aggregate_each(server_round, [unpack_each(one.content) for one in good])
        sums = [self._weighted(reply) for reply in good]
        clients = sum(reply.clients for reply in sums)
        reported = clients if self.privacy is None else self.privacy.reported_clients(clients)
        metrics = MetricRecord(
            {
                "num-clients": reported,
                "num-examples": sum(reply.examples for reply in sums),
                **self._traffic(sums, reported),
            }
        )
        losses = sum(reply.losses for reply in sums)
        if losses:
            metrics["loss"] = sum(reply.loss for reply in sums) / losses
        if self.privacy is not None:
            # a second reply is ignored
            asked = [self._asked.pop(_sender(reply), 0) for reply in good]
            answers = list(zip(sums, asked, strict=True))
            changes = self.privacy.release(server_round, self._theta, answers)
            denominator = self.privacy.plan.denominator
            aggregate = Aggregate(changes, denominator, denominator, server_round)
            if self.watch is not None:
                total = aggregate.total(self._theta)
                self.watch(server_round, {n: value / denominator for n, value in total.items()})
        elif clients:
            changes = {
                name: self._summed(name, [reply.total[name] for reply in sums])
                for name in self._theta
            }
            weight = sum(reply.weight for reply in sums)
            aggregate = Aggregate(changes, clients, weight, server_round)
        else:
            return None, metrics
        return self._applied(aggregate), metrics

    def _weighted(self, reply: Message) -> TrainSum:
        """A node's sum, multiplied by the weight of its clients' updates."""
        found = unpack_sum(reply.content)
        _, key = _sender(reply)
        part = self._parts.get(key)
        if part is None or part.arrays is self._arrays:
            return found
        # what is relative to the parameters is so to those of the part
        start = zero_copy_arrays(part.arrays)
        total = {
            name: scaled(_without_drift(change, start[name]), part.weight)
            for name, change in found.total.items()
        }
        return replace(found, total=total)

    def _aggregate_each(
        self, server_round: int, answers: list[TrainEach]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Apply the updates of the single clients; without any the parameters stay.

        Raises:
            ClientError: a node answered for clients that were not asked, or a second time.
        """
        for reply in answers:
            clients = reply.clients.tolist()
            if not self._open.issuperset(clients):
                raise ClientError(
                    "a node answered for other clients than it was asked for",
                    expected="each client of the message once",
                    got=f"clients {', '.join(map(str, clients))}",
                    fix="run the same version of fedrec on server and nodes",
                )
            self._open -= set(clients)
        answers = [reply for reply in answers if len(reply.clients)]
        if not answers:
            return None, MetricRecord(
                {"num-clients": 0, "num-examples": 0, "bytes-up": 0, "bytes-down": self._down}
            )
        each = TrainEach.joined(answers)
        count = len(each.clients)
        up = self._requested + network_bytes(each.updates.arrays())
        metrics = MetricRecord(
            {
                "num-clients": count,
                "num-examples": int(each.examples.sum()),
                "bytes-up": up,
                "bytes-down": self._down,
            }
        )
        losses = each.losses[np.isfinite(each.losses)]
        if len(losses):
            metrics["loss"] = float(losses.mean())
        return self._applied(Aggregate({}, count, count, server_round, each)), metrics

    def _applied(self, aggregate: Aggregate) -> ArrayRecord:
        """The parameters after the rule, in their types."""
        kinds = {name: value.dtype for name, value in self._theta.items()}
        theta = self.apply(self._theta, aggregate)
        return to_record(
            {name: theta[name].astype(kind, copy=False) for name, kind in kinds.items()}
        )

    def _traffic(self, sums: Sequence[TrainSum], reported: int) -> dict[str, int]:
        """Bytes from and to the clients of a round: whole updates where nodes do not tell. If
        cohorts are secret, those of the reported number of clients, whoever answered."""
        if self.privacy is not None and self.privacy.hides_cohorts:
            trained = self.privacy.plan.trained(self._theta)
            whole = sum(self._theta[name].nbytes for name in trained)
            return {"bytes-up": reported * whole, "bytes-down": reported * self._whole}
        names = {name for reply in sums for name in reply.total}
        whole = sum(self._theta[name].nbytes for name in names & self._theta.keys())
        up = sum(reply.sent or reply.clients * whole for reply in sums)
        return {"bytes-up": up, "bytes-down": self._down}

    def _summed(self, name: str, changes: list[Change]) -> Change:
        """The nodes' sums of one parameter, in node order."""
        if len(changes) == 1 and not isinstance(changes[0], SparseUpdate):
            return changes[0].astype(np.float64)
        return functools.reduce(lambda one, other: added(one, other, self._theta[name]), changes)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None, because the server loop evaluates all strategies in the same way."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """None, see `configure_evaluate`."""
        return None

    def summary(self) -> None:
        """Flower's hook for log lines; the run folder has the settings."""


class GeneratingStrategy(CohortStrategy):
    """Base of strategies whose server generates the parameters of each client. The global
    parameters never leave the server.
    """

    @abstractmethod
    def generate(
        self, theta: Mapping[str, np.ndarray], clients: np.ndarray, requests: ItemRequests | None
    ) -> ClientArrays:
        """Generated parameters of some clients.

        Args:
            theta: the global parameters.
            clients: `int64 [clients]`, ascending.
            requests: the items whose rows each of them needs; None: whole tables.
        """


def _sender(reply: Message) -> tuple[int, str]:
    """The node of a reply, and the part of the round that its order was for."""
    return reply.metadata.src_node_id, reply.metadata.group_id


def _without_drift(change: Change, table: np.ndarray) -> Change:
    """A change of a table `[...]` whose untouched rows stay."""
    drifts = isinstance(change, SparseUpdate) and change.drift
    return dense_change(change, table) if drifts else change


def refuse_to_wait(strategy: Strategy, nodes: int) -> None:
    """Refuse a strategy that waits for more nodes than there are: Flower's strategies would wait
    forever.

    Raises:
        ExperimentError: its minimum is above `nodes`.
    """
    needed = max(
        getattr(strategy, "min_available_nodes", 0), getattr(strategy, "min_train_nodes", 0)
    )
    if needed > nodes:
        raise ExperimentError(
            f"strategy {type(strategy).__name__!r} waits for more nodes than there are",
            expected=f"at least {needed} nodes",
            got=f"{nodes}",
            fix="set engine.nodes, or strategy.min-available-nodes and strategy.min-train-nodes",
        )


def refuse_non_finite(
    parameters: Mapping[str, np.ndarray], number: int, strategy: Strategy
) -> None:
    """Refuse parameters with NaN or infinity after a round.

    Raises:
        ClientError: NaN or infinity is in one of them.
    """
    for name, array in parameters.items():
        if not finite(array):
            raise ClientError(
                f"training diverged in round {number}",
                expected="finite parameters",
                got=f"NaN or infinity in {name!r} from {named(STRATEGY.name, strategy)}",
                fix=(
                    "lower step.learning-rate or strategy.server-lr, or fix that file; "
                    "the previous checkpoint is intact"
                ),
            )


def strategy_errors(strategy: Strategy, doing: str) -> AbstractContextManager[None]:
    """Errors within name the strategy and what it was doing, see `component_errors`."""
    return component_errors(STRATEGY.name, strategy, doing)


def refuse_other_parameters(
    strategy: Strategy, number: int, found: ArrayRecord, before: ArrayRecord
) -> None:
    """Refuse aggregated parameters whose names or shapes differ from those before the round.

    Raises:
        ComponentError: they differ.
    """
    shapes = {name: tuple(array.shape) for name, array in before.items()}
    refuse_other_arrays(STRATEGY.name, strategy, f"in round {number}", found, shapes)


def refuse_non_additive(strategy: Strategy) -> None:
    """Refuse a strategy that needs more of a round than the sum of its clients' updates.

    Raises:
        ExperimentError: it is one of Flower's own, sends each client parameters of its own, or
            aggregates by itself.
    """
    parts = list(strategy.by_phase.values()) if isinstance(strategy, CohortStrategy) else [strategy]
    for part in parts:
        if not isinstance(part, CohortStrategy) or not part.uses_only_sums():
            raise ExperimentError(
                f"strategy {type(part).__name__!r} needs more than the sum, which is all that"
                " secure aggregation provides",
                expected="one of fedrec's additive strategies, such as 'reptile' or 'fedavg'",
                got="a strategy that needs the replies of single nodes or clients",
                fix="set strategy.name = 'reptile', or leave out secure-aggregation",
            )
