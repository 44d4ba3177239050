# SPDX-License-Identifier: Apache-2.0
"""Exchange with nodes: replies, dropped replies, and item requests."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Error, Message
from flwr.serverapp import Grid

from fedrec.errors import ClientError, RefusalError
from fedrec.experiment.schema import EngineConfig
from fedrec.protocol.client_arrays import ItemRequests
from fedrec.protocol.messages import ITEMS, pack_order, read_arrays
from fedrec.protocol.orders import ItemQuery, Purpose
from fedrec.runtime.files import MOST_JSON, parse_json
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
