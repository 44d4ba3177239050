# SPDX-License-Identifier: Apache-2.0
"""Nodes of a run: their replies, dropped replies, item requests, and the clients of each."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedrec.errors import ClientError, EngineError, RefusalError
from fedrec.experiment.schema import EngineConfig
from fedrec.protocol.messages import (
    HELLO,
    ITEMS,
    ItemQuery,
    Presence,
    Purpose,
    pack_order,
    read_arrays,
    unpack_presence,
)
from fedrec.protocol.updates import ItemRequests
from fedrec.runtime.files import MOST_JSON, parse_json
from fedrec.runtime.ragged import distinct
from server.checkpoint import RunExtension

# Log of replies that were dropped or norm-clipped: number in each round, nodes and reasons.
#
# In `rounds.csv`: `dropped-replies`, `bounded-replies` (numbers of replies) and
# `dropped-or-bounded` (the nodes with the reasons; empty in rounds without any). A run on real
# nodes always has these columns, a simulation only from the first such reply on. At the end of the
# run a sentence states the totals. In privacy mode `secure` all of this is in the log only, because
# only nodes with clients of the secret cohort can fail to reply.

_TOLD = 300  # characters of a reason
_NAMED = 5  # nodes in the sentence at the end
_IDS = re.compile(r"(?:\bnode )?\b(\d{6,20})\b")  # of Flower, which draws them at random


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Replace Flower's ids by names of nodes, such as `node-2`, in a text.

    Args:
        text: any text.
        names: names of nodes, by Flower's id; other ids stay.
    """
    return _IDS.sub(lambda match: names.get(match[1], match[0]), text) if names else text


def name_nodes(record: logging.LogRecord, names: Mapping[str, str]) -> bool:
    """Log filter that replaces Flower's ids by names of nodes."""
    record.msg = with_names(record.getMessage(), names)
    record.args = None
    return True


class DroppedReplies(RunExtension):
    """Counter of each round's replies that were dropped or scaled down.

    Args:
        always: whether every round has these columns.
        secret: whether nothing is recorded outside the log.
        called: names of nodes, by Flower's id.
    """

    name = "replies"

    def __init__(
        self, *, always: bool = False, secret: bool = False, called: Mapping[str, str] | None = None
    ) -> None:
        self._always = always and not secret
        self._secret = secret
        self._called = called or {}
        self._round: list[tuple[str, str]] = []  # kind and text of each event in this round
        self._counts: Counter[str] = Counter()  # replies by kind of event, and rounds
        self._nodes: Counter[str] = Counter()

    def dropped(self, node: int | None, reason: str) -> None:
        """Record a dropped or missing reply.

        Args:
            node: Flower's id of the node; None: unknown.
            reason: the reason.
        """
        self._add("dropped", node, reason)

    def bounded(self, node: int, reason: str) -> None:
        """Record a reply that is scaled down."""
        self._add("bounded", node, reason)

    def after_round(self, round_number: int, arrays: ArrayRecord) -> dict[str, Any]:
        """Return the round's numbers of such replies, and their nodes."""
        records = self._round
        self._round = []
        if not (records or self._always):
            return {}
        self._always = True
        self._counts["rounds"] += bool(records)
        counts = Counter(what for what, _ in records)
        return {
            "dropped-replies": counts["dropped"],
            "bounded-replies": counts["bounded"],
            "dropped-or-bounded": "; ".join(text for _, text in records),
        }

    def memory(self) -> dict[str, np.ndarray]:
        """Return the totals, for a resumed run."""
        text = json.dumps([self._counts, self._nodes])
        return {"totals": np.frombuffer(text.encode(), dtype=np.uint8)}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        if "totals" in memory:
            self._counts, self._nodes = map(
                Counter, parse_json(memory["totals"].tobytes(), MOST_JSON)
            )

    def report(self, rounds: int) -> dict[str, Any]:
        """Report the totals, final evaluation included, if there are any."""
        dropped = self._counts["dropped"]
        bounded = self._counts["bounded"]
        if not dropped + bounded:
            return {}
        words = (
            f"Replies of nodes: {dropped} dropped or missing, {bounded} scaled down, in"
            f" {self._counts['rounds']} of {rounds} rounds{self._most()}. The columns"
            " dropped-replies, bounded-replies and dropped-or-bounded of rounds.csv, and log.txt,"
            " list them with reasons."
        )
        return {"dropped": dropped, "bounded": bounded, "in words": [words]}

    def _add(self, what: str, node: int | None, reason: str) -> None:
        if self._secret:
            return
        who = "a node" if node is None else with_names(f"node {node}", self._called)
        self._round.append((what, f"{who}: {' '.join(reason.split())[:_TOLD]}"))
        self._counts[what] += 1
        if node is not None:
            self._nodes[who] += 1

    def _most(self) -> str:
        if not self._nodes:
            return ""
        named = [f"{node} {count}" for node, count in self._nodes.most_common(_NAMED)]
        return " and the evaluations (" + ", ".join(named) + ")"


# Replies of a round without errors; raises an error if too many failed.

log = logging.getLogger("fedrec")
# Flower's format of a ClientApp's exception
_RAISED = re.compile(r"<class '([\w.]+)'>:<'(.*)'>", re.DOTALL)
_REFUSAL = f"{RefusalError.__module__}.{RefusalError.__qualname__}"


def reason_of(error: Error) -> str:
    """Text of a node's error, without the class that Flower prepends."""
    match = _RAISED.fullmatch(str(error.reason))
    return (match[2] if match else str(error.reason)).strip()


def is_refusal(error: Error) -> bool:
    """True if a node refused an order, rather than failed."""
    match = _RAISED.fullmatch(str(error.reason))
    return match is not None and match[1] == _REFUSAL


def answers(
    replies: Iterable[Message],
    *,
    sent: Sequence[int],
    max_failures: float,
    dropped: DroppedReplies | None = None,
    may_be_late: bool = False,
) -> list[Message]:
    """Select the replies without an error.

    Args:
        replies: the received messages.
        sent: Flower's id of the node of each message sent; a missing reply is a failure.
        max_failures: largest tolerated share of failures, in [0, 1].
        dropped: records the failures.
        may_be_late: whether a missing reply is not a failure.

    Raises:
        ClientError: more nodes failed; contains the first node's error.
    """
    replies = list(replies)
    good = [reply for reply in replies if not reply.has_error()]
    failed = [reply for reply in replies if reply.has_error()]
    missing = Counter(sent) - Counter(reply.metadata.src_node_id for reply in replies)
    for reply in failed:
        log.warning("node %d failed: %s", reply.metadata.src_node_id, reason_of(reply.error))
    if missing:
        log.warning("%d of %d nodes did not reply before the deadline", missing.total(), len(sent))
    if dropped is not None:
        for reply in failed:
            dropped.dropped(reply.metadata.src_node_id, f"failed: {reason_of(reply.error)}")
        for node in missing.elements():
            dropped.dropped(node, "no reply before the deadline")
    lost = len(failed) if may_be_late else len(sent) - len(good)
    if sent and lost / len(sent) > max_failures:
        reason = reason_of(failed[0].error) if failed else "no reply before the deadline"
        raise ClientError(
            f"{lost} of {len(sent)} nodes failed",
            expected=f"at most a share of {max_failures:g} of the nodes",
            got=reason,
            fix="fix the error above, or raise engine.max-failures or engine.timeout",
        )
    return good


# Requests for the items whose rows clients need, before parameters are generated for them.


def request_items(
    grid: Grid,
    engine: EngineConfig,
    groups: Mapping[int, np.ndarray],
    round_number: int,
    purpose: Purpose,
    step: dict[str, Any],
) -> dict[int, ItemRequests]:
    """Request the items that clients need, by node, in the order of `groups`, without failed nodes.

    Args:
        grid: connection to the nodes.
        engine: timeout, and tolerated share of failures.
        groups: clients `int64 [clients]` by node id.
        round_number: the round that the parameters are for.
        purpose: training, or evaluation on held-out rows.
        step: name and settings of the clients' step.

    Raises:
        ClientError: too many nodes failed.
    """
    messages = [
        Message(pack_order(ItemQuery(round_number, clients, purpose, step)), node, ITEMS)
        for node, clients in groups.items()
    ]
    replies = grid.send_and_receive(messages, timeout=engine.timeout) if messages else []
    good = answers(replies, sent=list(groups), max_failures=engine.max_failures)
    requests = {
        reply.metadata.src_node_id: ItemRequests.read(read_arrays(reply.content)) for reply in good
    }
    return {node: requests[node] for node in groups if node in requests}


# Clients of a federation, and the node that trains each.

# Balances a cohort's work between nodes that can train any of its clients. A round takes as long as
# its slowest node. A node trains its clients in blocks, those with the most work first; the time of
# a block grows with the steps of its longest client, with the work of all its clients, and with
# their number. The constants are those of compiled code that takes all steps of a client at once,
# where the first term is small.

_BLOCK = 32  # clients that are trained together
# fixed cost of a client, in examples (measured on a CPU)
_CLIENT_COST = 40
# fixed cost of a step of a block, in units of the cost per client in it (measured on a CPU)
_STEP_COST = 0.1


def _balanced(work: np.ndarray, nodes: int) -> list[np.ndarray]:
    """Balance clients between nodes, so that all nodes end at about the same time: each client,
    those with the most work first, goes to the node that then ends first.

    Args:
        work: `[clients]`, number of examples of each.
        nodes: number of nodes.

    Returns:
        Indices in `work` of each node's clients, `int64 [n]`, ascending; a function of the
        arguments alone.
    """
    shares: list[list[int]] = [[] for _ in range(nodes)]
    costs = [0.0] * nodes
    for client in np.argsort(-work, kind="stable").tolist():
        ends = [
            cost
            + _CLIENT_COST
            + float(work[client]) * (1 + (_STEP_COST if len(share) % _BLOCK == 0 else 0.0))
            for cost, share in zip(costs, shares, strict=True)
        ]
        node = ends.index(min(ends))
        costs[node] = ends[node]
        shares[node].append(client)
    return [np.sort(np.array(share, dtype=np.int64)) for share in shares]


# The clients of a federation, and the node that hosts each.
#
# Flower's node ids are random numbers, so the server asks every node once which clients it hosts.
# Simulated nodes are ordered by the partition that they report, which makes sums and results
# independent of these ids; real nodes keep the id of their key, and are ordered by it.


@dataclass(frozen=True, eq=False)
class Roster:
    """Nodes of a federation, and their clients.

    Attributes:
        nodes: Flower's node ids, in the order of partitions, or of ids for real nodes.
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
        for node, share in zip(self.nodes, _balanced(work, len(self.nodes)), strict=True):
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
