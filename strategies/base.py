# SPDX-License-Identifier: Apache-2.0
"""Flower strategies that train a cohort of clients per round, and the checks of a strategy.

A round: the sampler draws the cohort, the cohort is grouped by node, every node gets one message
(all messages share the parameters) and replies with one sum. The sums are added in node order, and
the rule of the subclass applies them. A strategy with `reply = "each"` gets the update of each
client instead, as a median needs.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from pydantic import Field

from fedrec.components.sections import Section
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.phases import MAIN, Phase
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.protocol.messages import (
    Reply,
    TrainEach,
    TrainOrder,
    TrainSum,
    Weighting,
    pack_order,
    unpack_each,
    unpack_sum,
)
from fedrec.protocol.serialization import to_record, zero_copy_arrays
from fedrec.protocol.updates import (
    Change,
    ItemRequests,
    SparseUpdate,
    added,
    apply_changes,
    dense_change,
    network_bytes,
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
    """Number of rounds at the full rate before it falls, such as those of an earlier phase; rounds
    are counted from the experiment's first."""

    def rate(self, round_number: int) -> float:
        """Server rate of a round, from 1."""
        if self.anneal_rounds is None:
            return self.server_lr
        falling = max(0, round_number - 1 - self.anneal_after)
        return self.server_lr * max(0.0, 1.0 - falling / self.anneal_rounds)


class Cohorts(Protocol):
    """Clients as a strategy sees them: the cohort of each round, and the node of each client."""

    clients: np.ndarray
    """`int64 [clients]`, ascending: all clients that may be sampled."""
    section: Section
    """Name and settings of the sampler."""

    @property
    def schedule(self) -> Scheduled | None:
        """Participation bound that the sampler guarantees; None: none."""
        ...

    def sample(self, round_number: int) -> np.ndarray:
        """Cohort of a round, `int64 [clients]`, ascending."""
        ...

    def by_node(self, clients: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """Group a cohort `int64 [n]` by the node that trains it, in node order; each group of a
        node gets a message."""
        ...

    def item_requests(
        self, groups: Mapping[int, np.ndarray], round_number: int
    ) -> dict[int, ItemRequests]:
        """Request the items that clients need in a round, by node, without nodes that failed."""
        ...

    def among(self, clients: np.ndarray, sampler: Section | None = None) -> Cohorts:
        """Make cohorts of some clients `int64 [n]`, drawn by the same sampler or another."""
        ...


@dataclass(frozen=True, eq=False)
class Aggregate:
    """Aggregated replies of a round.

    Attributes:
        changes: weighted sum of the updates, per parameter, float64; only the changed rows of a
            table with few of them. Empty with `reply = "each"`.
        clients: number of clients in it; under differential privacy the fixed denominator.
        weight: sum of the weights; likewise.
        round: number of the round, from 1.
        each: the update of each client; None unless the strategy requests them.
    """

    changes: dict[str, Change]
    clients: float
    weight: float
    round: int
    each: TrainEach | None = None

    def total(self) -> dict[str, np.ndarray]:
        """Return the sums as whole arrays, float64."""
        return {name: dense_change(change) for name, change in self.changes.items()}

    def added_to(self, theta: Mapping[str, np.ndarray], rate: float) -> dict[str, np.ndarray]:
        """Compute `theta + rate * sum`; may change `theta` in place, see
        `fedrec.protocol.updates.apply_changes`."""
        return apply_changes(theta, self.changes, rate)


class _LoopEvaluates(Strategy):
    """Empty methods of Flower's interface besides training: the server loop evaluates all
    strategies in the same way, and the run folder contains the settings."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        pass


class CohortStrategy(_LoopEvaluates):
    """Base of fedrec's strategies. A subclass defines how updates are weighted and how their sum is
    applied, or requests each of them.

    A built-in has a `name` and lives in `strategies/`, its configuration class above it.

    Args:
        config: its settings.
        cohorts: the clients.
        step: name and settings of the local step that the clients run.

    Attributes:
        reply: type of the nodes' replies: the sum of their clients' updates, or the update of each.
            `each` excludes secure aggregation and the user-level guarantee of `[privacy]`.
        weighting: weight of a client's update in the sum.
        memories: objects whose `state()` and `restore(state)` a resumed run needs, by the prefix of
            their arrays' names.
        privacy: clip, noise and charge of its rounds; None: no differential privacy.
    """

    Config: ClassVar[type[Config]] = Config
    reply: ClassVar[Reply] = "sum"
    weighting: Weighting = "uniform"

    def __init__(self, config: Config, cohorts: Cohorts, step: dict[str, Any]) -> None:
        self.config = config
        self.cohorts = cohorts
        self.step = step
        self.memories: dict[str, Any] = {}
        self.privacy: DpFedAvg | None = None
        self._round = 0
        self._theta: dict[str, np.ndarray] = {}
        self._asked: dict[tuple[int, str], int] = {}  # number of clients, by node and message group
        self._whole = 0  # bytes of the shared parameters
        self._down = 0  # bytes to the clients of the round
        self._requested = 0  # bytes of their item requests

    @classmethod
    def schedule(cls, config: Any, step: Mapping[str, Any]) -> tuple[Phase, ...]:
        """Phases of a strategy with these settings, in order; a single one by default.

        Args:
            config: settings of this class.
            step: name and settings of the experiment's local step.
        """
        return (Phase(MAIN, step),)

    def phases(self) -> dict[str, CohortStrategy]:
        """Strategies that send orders and aggregate, by the phases in `schedule`. A strategy that
        contains others overrides this to return all of theirs, at any depth; clip and noise are set
        on these."""
        return {MAIN: self}

    def check_parameters(self, theta: Mapping[str, np.ndarray]) -> None:
        """Check the initial global parameters, before the first round; all are accepted by default.

        Raises:
            ExperimentError: the strategy cannot aggregate updates of these parameters.
        """

    @abstractmethod
    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and a round's aggregate with at
        least one client.

        `theta` may be changed in place; it is not read afterwards.
        """

    def state(self) -> dict[str, np.ndarray]:
        """Return the state for a resumed run, as named arrays: that of `memories`."""
        return add_prefix({prefix: memory.state() for prefix, memory in self.memories.items()})

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        for prefix, memory in self.memories.items():
            memory.restore(strip_prefix(prefix, state))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make one message for each node that hosts clients of the round's cohort; several if
        `Cohorts.by_node` returns several groups of a node."""
        self._round = server_round
        self._theta = zero_copy_arrays(arrays)
        self._whole = network_bytes(self._theta)
        self._asked = {}
        self._down = 0
        self._requested = 0
        protection = None if self.privacy is None else self.privacy.plan.protection(self._theta)
        each = self.reply == "each"
        groups = list(self.cohorts.by_node(self.cohorts.sample(server_round)))
        for number, (node, clients, sent) in enumerate(self._sent(server_round, groups, arrays)):
            group = str(number) if (node, "") in self._asked else ""
            self._asked[node, group] = len(clients)
            if sent is arrays:
                self._down += self._whole * len(clients)
            else:
                client_arrays = zero_copy_arrays(sent)
                self._down += network_bytes(client_arrays)
                self._requested += ItemRequests.read(client_arrays).items.nbytes
            order = TrainOrder(
                server_round, clients, self.weighting, self.step, protection=protection, each=each
            )
            yield Message(pack_order(order, sent), node, MessageType.TRAIN, group_id=group)

    def _sent(
        self, server_round: int, groups: Sequence[tuple[int, np.ndarray]], arrays: ArrayRecord
    ) -> Iterable[tuple[int, np.ndarray, ArrayRecord]]:
        """Nodes of a round, their clients, and the parameters sent to each: the global ones."""
        return ((node, clients, arrays) for node, clients in groups)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the nodes' sums in node order and apply them; without any client the parameters stay.
        Under differential privacy the sums are applied whichever nodes replied, so that the release
        does not depend on it.
        """
        good = [reply for reply in replies if not reply.has_error()]
        if self.reply == "each":
            return self._aggregate_each(server_round, [unpack_each(m.content) for m in good])
        sums = [unpack_sum(reply.content) for reply in good]
        clients = sum(reply.clients for reply in sums)
        # cohorts are secret in secure mode: then the expected number is reported
        reported = clients
        if self.privacy is not None and self.privacy.hides_cohorts:
            reported = round(self.privacy.plan.denominator)
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
            senders = [(m.metadata.src_node_id, m.metadata.group_id) for m in good]
            asked = [self._asked.pop(sender, 0) for sender in senders]
            answers = list(zip(sums, asked, strict=True))
            changes = self.privacy.release(server_round, self._theta, answers)
            denominator = self.privacy.plan.denominator
            aggregate = Aggregate(changes, denominator, denominator, server_round)
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

    def _aggregate_each(
        self, server_round: int, answers: list[TrainEach]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Apply the updates of the clients; without any the parameters stay."""
        answers = [reply for reply in answers if len(reply.clients)]
        metrics = MetricRecord({"num-clients": 0, "num-examples": 0, "bytes-up": 0})
        metrics["bytes-down"] = self._down
        if not answers:
            return None, metrics
        each = TrainEach.joined(answers)
        count = len(each.clients)
        metrics["num-clients"] = count
        metrics["num-examples"] = int(each.examples.sum())
        metrics["bytes-up"] = self._requested + network_bytes(each.updates.arrays())
        losses = each.losses[np.isfinite(each.losses)]
        if len(losses):
            metrics["loss"] = float(losses.mean())
        return self._applied(Aggregate({}, count, count, server_round, each)), metrics

    def _applied(self, aggregate: Aggregate) -> ArrayRecord:
        """Apply the rule, and restore the types of the parameters."""
        kinds = {name: value.dtype for name, value in self._theta.items()}
        theta = self.apply(self._theta, aggregate)
        return to_record(
            {name: theta[name].astype(kind, copy=False) for name, kind in kinds.items()}
        )

    def _traffic(self, sums: Sequence[TrainSum], reported: int) -> dict[str, int]:
        """Bytes from and to the clients of a round: whole updates if nodes do not report them. If
        cohorts are secret, those of the reported number of clients, whoever replied."""
        if self.privacy is not None and self.privacy.hides_cohorts:
            trained = self.privacy.plan.trained(self._theta)
            whole = sum(self._theta[name].nbytes for name in trained)
            return {"bytes-up": reported * whole, "bytes-down": reported * self._whole}
        names = {name for reply in sums for name in reply.total}
        whole = sum(self._theta[name].nbytes for name in names & self._theta.keys())
        up = sum(reply.sent or reply.clients * whole for reply in sums)
        return {"bytes-up": up, "bytes-down": self._down}

    def _summed(self, name: str, changes: list[Change]) -> Change:
        """Add the nodes' sums of one parameter, in node order."""
        if len(changes) == 1 and not isinstance(changes[0], SparseUpdate):
            return changes[0].astype(np.float64)
        return functools.reduce(added, changes)


def server_rate(config: Any, round_number: int) -> float:
    """Factor that multiplies the mean update in a round, from 1: the `rate` of a strategy's
    settings, else their constant `server_lr`, else 1. Accounting and audits use it."""
    rate: Any = getattr(config, "rate", None)
    factor: Any = rate(round_number) if callable(rate) else getattr(config, "server_lr", 1.0)
    return float(factor)


def more_than_sums(strategy: type[Strategy]) -> str:
    """Reason why a strategy needs more than the sum of the clients' updates, which noise and secure
    aggregation do not cover; empty if it needs only the sum."""
    if not issubclass(strategy, CohortStrategy):
        return "it is a strategy of Flower's, whose averaging of updates cannot be controlled"
    if strategy.reply == "each":
        return "its server needs the update of each client"
    methods = strategy.configure_train, strategy.aggregate_train
    if methods != (CohortStrategy.configure_train, CohortStrategy.aggregate_train):
        return "it overrides configure_train or aggregate_train"
    return ""


def not_private(strategy: Strategy, reason: str) -> ExperimentError:
    """Error for a strategy whose rounds cannot be made differentially private."""
    return ExperimentError(
        f"strategy {type(strategy).__name__!r} cannot be made private by [privacy]",
        expected="one of fedrec's own strategies, with a rule in `apply` that uses the sum of the"
        " clients' updates, each of which counts the same",
        got=reason,
        fix="set strategy.name = 'reptile' or strategy.weighting = 'uniform', or leave out"
        " [privacy]; [perturb] perturbs the data on the devices",
    )


def check_private(strategy: CohortStrategy) -> None:
    """Check that the rounds of a strategy can be made differentially private.

    Raises:
        ExperimentError: it needs more than the sum of the updates, or weights clients by their
            data.
    """
    reason = more_than_sums(type(strategy))
    if not reason and strategy.weighting != "uniform":
        reason = f"weighting {strategy.weighting!r}: a client's share of the sum is unbounded"
    if reason:
        raise not_private(strategy, reason)


def parts_of(strategy: Strategy) -> list[Strategy]:
    """Strategies that send orders and aggregate: those of the phases, or the strategy itself if it
    is one of Flower's."""
    return list(strategy.phases().values()) if isinstance(strategy, CohortStrategy) else [strategy]
