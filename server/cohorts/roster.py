# SPDX-License-Identifier: Apache-2.0
"""The clients of a federation, and the node that hosts each.

Flower's node ids are random numbers, so the server asks every node once which clients it hosts.
Nodes are ordered by the partition that they report, which makes sums and results independent of
Flower's ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedrec.errors import EngineError
from fedrec.protocol.messages import HELLO, unpack_presence
from fedrec.protocol.orders import Presence
from fedrec.runtime.grouping import distinct
from server.cohorts.balance import balanced
from server.exchange.replies import answers


@dataclass(frozen=True, eq=False)
class Roster:
    """The clients of a federation.

    Attributes:
        nodes: Flower's node ids, in the order of the nodes' partitions.
        presences: the reply of each, in the same order.
    """

    nodes: tuple[int, ...]
    presences: tuple[Presence, ...]

    @cached_property
    def training(self) -> np.ndarray:
        """`int64 [clients]`, ascending: all clients that may be sampled for training."""
        return np.sort(_joined(presence.training for presence in self.presences))

    @cached_property
    def evaluated(self) -> np.ndarray:
        """`int64 [clients]`, ascending: all clients that have held-out rows."""
        return np.sort(_joined(presence.evaluated for presence in self.presences))

    @cached_property
    def validated(self) -> np.ndarray:
        """`int64 [clients]`, ascending: all clients that have validation rows, as reported by the
        nodes."""
        return np.sort(_joined(p.validated for p in self.presences if p.validated is not None))

    def by_node(self, clients: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Group clients by the node that hosts them: (node id, `int64 [clients]`) in node
        order, no empty groups."""
        places = self.places_of(clients)
        for place, node in enumerate(self.nodes):
            group = clients[places == place]
            if len(group):
                yield node, group

    def for_training(self, clients: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Group clients `int64 [n]` by the node that is to train them: their host, or any node if
        all nodes report that they can train every client."""
        work = self.work_of(clients)
        if work is None:
            yield from self.by_node(clients)
            return
        for node, share in zip(self.nodes, balanced(work, len(self.nodes)), strict=True):
            if len(share):
                yield node, clients[share]

    def work_of(self, clients: np.ndarray) -> np.ndarray | None:
        """`int64 [clients]`, number of training rows of each; None unless every node reports it."""
        return None if self._work is None else self._work[np.searchsorted(self.training, clients)]

    @cached_property
    def _work(self) -> np.ndarray | None:
        """Work of each client in `training`."""
        said = [presence.work for presence in self.presences if presence.work is not None]
        if len(said) < len(self.presences):
            return None
        order = np.argsort(np.concatenate([presence.training for presence in self.presences]))
        return np.concatenate(said)[order]

    def places_of(self, clients: np.ndarray) -> np.ndarray:
        """Index in `nodes` of the node that hosts each client `int64 [n]`, -1 for none; ids may be
        any integers."""
        ids, places = self._hosts
        if not len(ids):
            return np.full(len(clients), -1)
        found = np.minimum(np.searchsorted(ids, clients), len(ids) - 1)
        return np.where(ids[found] == clients, places[found], -1)

    @cached_property
    def _hosts(self) -> tuple[np.ndarray, np.ndarray]:
        """All ids, ascending, and the place of the node that hosts each; of several nodes the
        last."""
        hosted = [_hosted_by(presence) for presence in self.presences]
        ids = _joined(hosted)[::-1]
        places = _joined(np.full(len(part), place) for place, part in enumerate(hosted))[::-1]
        distinct, first = np.unique(ids, return_index=True)
        return distinct, places[first]


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The numbers of some arrays, also of none, `int64 [n]`."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _hosted_by(presence: Presence) -> np.ndarray:
    said = (presence.training, presence.evaluated, presence.validated)
    return distinct(np.concatenate([part for part in said if part is not None]))


def call_roster(grid: Grid, *, timeout: float) -> Roster:
    """Ask every node of the grid which clients it hosts.

    Raises:
        EngineError: there is no node, a node failed to answer, or two nodes report the same
            partition.
        ClientError: a node could not read its data.
    """
    nodes = list(grid.get_node_ids())
    messages = [Message(RecordDict(), node, HELLO) for node in nodes]
    replies = answers(
        grid.send_and_receive(messages, timeout=timeout), sent=nodes, max_failures=0.0
    )
    found = sorted(
        ((unpack_presence(reply.content), reply.metadata.src_node_id) for reply in replies),
        key=lambda pair: pair[0].partition,
    )
    partitions = [presence.partition for presence, _ in found]
    if not found or len(set(partitions)) != len(partitions):
        raise EngineError(
            "the nodes do not form a federation",
            expected="at least one node, each with its own partition-id",
            got=f"partition-ids {partitions}",
            fix="give every node its own partition-id in its node configuration",
        )
    return Roster(tuple(node for _, node in found), tuple(presence for presence, _ in found))
