# SPDX-License-Identifier: Apache-2.0
"""Buffered asynchronous aggregation on real nodes (FedBuff, Nguyen et al. 2022, algorithm 1); on
simulated devices it is `server.devices.buffer`.

`concurrency` clients train at a time. A round ends when answers for as many clients as the
sampler's cohort has are in its buffer, whichever rounds their orders are of. A client that has
answered is replaced at once by one that starts from the present parameters. An order that nobody
has answered after `engine.timeout` seconds has expired: its node ends the work on it, the SuperLink
takes no answer to it, and its clients are free again.

Nobody starts while an own order is in flight or its answer in the buffer, nor in the round in which
the order failed or expired. So a client is in a sum at most once, and gets at most one order a
round. Nodes with an order that failed or expired get no other in that round. A node that goes
offline has not failed: few orders end in a round, so it could be most of them.

An order is for all clients of a node that start at one time, and so is its answer: a round may end
with a few clients more than the cohort has, and an answer that comes when the buffer is full is in
the next round. If nobody is left to be asked, a round ends with those who answered.

Orders in flight are not in checkpoints: their answers are lost when a run stops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import Strategy

from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.experiment.tables import AsynchronousConfig
from fedrec.protocol.messages import unpack_train_order
from fedrec.protocol.zero_copy import zero_copy_arrays
from server.cohorts.selection import SampledCohorts
from server.deployed.grid import OFFLINE, DeployedGrid, Waiting
from server.devices.choice import parts_of, refuse_personal, weighted_part
from server.devices.late_devices import LateDevices
from server.devices.staleness import StartingParameters, stale_columns, stale_words
from server.devices.starters import Starters, refuse_small
from strategies.base import CohortStrategy, Part


def order_buffer_of(
    experiment: Experiment, grid: DeployedGrid, strategy: Strategy
) -> OrderBuffer | None:
    """The orders in flight of a run on real nodes; None: its rounds wait for their own.

    Raises:
        ExperimentError: devices are simulated, or the strategy, step or clip does not fit.
    """
    refuse_personal(experiment)
    _refuse_simulated(experiment)
    if experiment.asynchronous is None:
        return None
    _refuse_moving_clip(experiment)
    part = weighted_part(parts_of(strategy, "asynchronous"))
    lives = experiment.engine.timeout
    part.staleness = found = OrderBuffer(experiment.asynchronous, grid, part, lives=lives)
    return found


class Order(NamedTuple):
    """An order to a node whose answer is in no sum so far."""

    message: Message
    clients: np.ndarray
    """`int64 [clients]`."""
    version: int
    """Number of rounds that made the parameters that it came with."""

    @classmethod
    def of(cls, message: Message) -> Order:
        """The order in a message that names its clients."""
        order = unpack_train_order(message.content)
        clients = np.empty(0, dtype=np.int64) if order.clients is None else order.clients
        return cls(message, clients, order.round - 1)

    @property
    def node(self) -> int:
        """Flower's id of the node."""
        return self.message.metadata.dst_node_id

    @property
    def part(self) -> str:
        """The part of a round that it belongs to, see `strategies.base.Staleness`."""
        return self.message.metadata.group_id


class OrderBuffer(LateDevices):
    """The orders in flight, and the rounds that their answers fill.

    Args:
        config: the experiment's `[asynchronous]` table.
        grid: reaches the nodes.
        strategy: makes the orders.
        lives: seconds after which an order expires.
    """

    name = "asynchronous"

    def __init__(
        self,
        config: AsynchronousConfig,
        grid: DeployedGrid,
        strategy: CohortStrategy,
        *,
        lives: float,
    ) -> None:
        super().__init__()
        self.config = config
        self.versions = StartingParameters(config.staleness_exponent)
        self._grid = grid
        self._strategy = strategy
        self._lives = lives
        self._starters = Starters()
        self._lost = 0  # clients in flight when a run stopped that this one continues
        self._orders: dict[str, Order] = {}  # in flight or answered too early, by identifier
        self._waiting: dict[str, Waiting] = {}  # those in flight
        self._early: list[Message] = []  # answers that came when the buffer was full
        self._round = 0  # the present one, and what is known of it:
        self._starting = np.empty(0, dtype=np.int64)
        self._parts = 0
        self._ready: set[int] = set()  # nodes that may get an order
        self._ended: list[Order] = []
        self._taken: list[Message] = []
        self._stale: list[int] = []  # of each client in the buffer

    def cohort(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        """The clients that start when a round does, `int64 [clients]`, ascending."""
        if self._round != round_number:
            self._cohorts = cohorts
            refuse_small(len(cohorts.clients), self._size, self.config.concurrency)
            self._parts = 0
            self._ended = []
            self._taken = []
            self._stale = []
            self._ready = self._grid.ready(cohorts.roster.nodes, self._lives)
            self._starting = self._next()
            self._round = round_number
        return self._starting

    def parts(
        self, round_number: int, clients: np.ndarray, arrays: ArrayRecord
    ) -> Mapping[str, Part]:
        """Clients `int64 [clients]` that start when a round does, and those in flight, see
        `strategies.base.Staleness`."""
        self.versions.keep(round_number - 1, zero_copy_arrays(arrays))
        by_part: defaultdict[str, list[Order]] = defaultdict(list)
        for order in self._orders.values():
            by_part[order.part].append(order)
        found = {
            part: self.versions.part(
                orders[0].version,
                np.sort(np.concatenate([order.clients for order in orders])),
                round_number,
                sent=True,
            )
            for part, orders in by_part.items()
        }
        return {**found, self._new_part(): Part(clients, arrays)}

    def exchange(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[Message]]:
        """Send the first orders of a round, and others for those that are answered, until its
        buffer is full.

        Returns:
            The messages with orders that ended in the round: they were answered, failed or expired;
            and the replies to them.
        """
        self._send(messages)
        early = self._early
        self._early = []
        for arrived in chain((early,), self._grid.arriving(self._waiting)):
            self._take(arrived)
            if self._full:
                break
            clients = self._next()
            if len(clients):
                self._send(list(self._strategy.more_messages(self._new_part(), clients)))
        return [order.message for order in self._ended], self._taken

    def announce(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """That orders in flight were lost, if there were any."""
        if not self._lost:
            return []
        return [
            f"{self._lost} clients trained when the run stopped; their answers are lost, and they"
            " may be asked again"
        ]

    def after_training(self, round_number: int, arrays: ArrayRecord) -> None:
        """Count the answers of a round, and forget parameters that nobody in flight started
        from."""
        self._columns = stale_columns(self._stale, self._counts)
        self.versions.forget_others({order.version for order in self._orders.values()})

    def memory(self) -> dict[str, np.ndarray]:
        """Who starts next, the totals, and how many clients are in flight."""
        flying = np.asarray(sum(len(order.clients) for order in self._orders.values()))
        return {**super().memory(), **self._starters.memory(), "in flight": flying}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned; who was in flight is free."""
        super().restore(memory)
        self._starters.restore(memory)
        self._lost = int(memory["in flight"])

    def report(self, rounds: int) -> tuple[list[str], dict[str, Any]]:
        """How many answers were stale."""
        words = f"Rounds on real nodes that waited for nobody: {stale_words(self._counts)}."
        return [words], {**self._counts, "in words": [words]}

    @property
    def _size(self) -> int:
        """Number of clients whose answers fill the buffer."""
        return int(self._cohorts.section.options["cohort"])

    @property
    def _full(self) -> bool:
        return len(self._stale) >= self._size

    def _new_part(self) -> str:
        self._parts += 1
        return f"{self._round}.{self._parts}"

    def _next(self) -> np.ndarray:
        """The clients that start now, `int64 [clients]`, ascending: as many as may."""
        flying = sum(len(self._orders[name].clients) for name in self._waiting)
        busy = {
            client
            for order in (*self._orders.values(), *self._ended)
            for client in order.clients.tolist()
        }
        free = self.config.concurrency - flying
        return np.sort(self._starters.start(free, self._cohorts, busy, self._reachable))

    def _reachable(self, clients: np.ndarray) -> np.ndarray:
        """Those of the clients `int64 [n]` whose nodes may get an order."""
        roster = self._cohorts.roster
        places = [place for place, node in enumerate(roster.nodes) if node in self._ready]
        return clients[np.isin(roster.places_of(clients), places)]

    def _send(self, messages: Sequence[Message]) -> None:
        sent = self._grid.send(messages, self._lives) if messages else {}
        self._waiting |= sent
        self._orders |= {name: Order.of(one.message) for name, one in sent.items()}

    def _take(self, arrived: Sequence[Message]) -> None:
        """Answers come into the buffer, those to the oldest orders first, and orders end."""
        age = {name: place for place, name in enumerate(self._orders)}
        for reply in sorted(arrived, key=lambda one: age[one.metadata.reply_to_message_id]):
            if self._full:
                self._early.append(reply)
                continue
            order = self._end(reply.metadata.reply_to_message_id)
            if not (reply.has_error() and reply.error.code == OFFLINE):
                self._taken.append(reply)
            if reply.has_error():
                self._ready.discard(order.node)
            else:
                self._stale += [self._round - 1 - order.version] * len(order.clients)
        alive = {*self._waiting, *(reply.metadata.reply_to_message_id for reply in self._early)}
        for name in [one for one in self._orders if one not in alive]:  # expired
            self._ready.discard(self._end(name).node)

    def _end(self, name: str) -> Order:
        order = self._orders.pop(name)
        self._ended.append(order)
        return order


def _refuse_simulated(experiment: Experiment) -> None:
    if experiment.devices is not None:
        raise ExperimentError(
            "[devices] is for simulated devices, and these nodes are real",
            expected="[closing] or [asynchronous], whose devices answer when they do",
            got="[devices]",
            fix="leave out [devices]",
        )


def _refuse_moving_clip(experiment: Experiment) -> None:
    """Refuse a clip norm that may be smaller when an answer comes than when it was clipped."""
    if experiment.privacy is not None and experiment.privacy.adaptive_clip is not None:
        raise ExperimentError(
            "the answers of real nodes to earlier rounds are clipped to the norms of those rounds,"
            " and the noise is for that of the present one",
            expected="[asynchronous] without privacy.adaptive-clip",
            got="privacy.adaptive-clip",
            fix="leave out privacy.adaptive-clip, or [asynchronous]",
        )
