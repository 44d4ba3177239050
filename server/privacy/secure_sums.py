# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation of training rounds: the server learns the sum over the nodes, but no node's
contribution (Bonawitz et al. 2017).

The strategy sees one node that trains the whole cohort and replies with one sum; so strategies, the
validation of replies and differential privacy work as without it, and bound the sum of all clients.
Each training order becomes a session of three exchanges with the online nodes that host the cohort:

1. they get each other's channel keys (requested once per node and run), and reply with a fresh
   mask key and with shares of two secrets, sealed for each other;
2. they get mask keys, shares and the training order, and reply with a masked sum;
3. they get the list of nodes whose masked sum arrived, and reply with shares of these nodes'
   self-masks and of the other nodes' mask keys, with which the masks are removed from the sum.

A node that fails before its second reply counts as missing in this round. If fewer nodes than the
quorum complete the session, the round has no sum, as if no node had replied: nothing is revealed.

Where this differs from the paper: see `fedrec.secure.keys`; mask keys and shares come in one
exchange instead of two. The paper's exchange of signatures on the list of survivors, against a
server that tells different nodes different things, is not here: to unmask one node, such a server
would need both kinds of shares from a quorum each, which is more than half of the nodes, and no
node gives both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedrec.errors import ExperimentError
from fedrec.experiment.phases import symmetric_of
from fedrec.experiment.schema import Experiment, SecureAggregationConfig
from fedrec.protocol.messages import (
    ARRAYS,
    SECURE_CHANNEL,
    SECURE_SHARES,
    SECURE_UNMASK,
    TrainOrder,
    TrainSum,
    pack_order,
    pack_sum,
    unpack_masked,
    unpack_order,
    unpack_words,
)
from fedrec.protocol.secure import (
    KEY_BYTES,
    SEALED_BYTES,
    SEED_BYTES,
    ChannelReply,
    ShareReply,
    UnmaskReply,
)
from fedrec.protocol.serialization import zero_copy_arrays
from fedrec.runtime.process import Backoff
from fedrec.secure import vector
from fedrec.secure.session import Session
from server.nodes import DroppedReplies, Roster, answers

log = logging.getLogger("fedrec")
FEDERATION = 1
"""Flower's id of the server, used for all nodes together."""
_UNREADABLE = 0  # Flower's code of an unknown error
_FIRST_LOOK = 0.2
_LAST_LOOK = 2.0  # seconds between checks of which nodes are online
Read = TypeVar("Read")


class _WholeFederation(Roster):
    """Roster whose nodes train as one."""

    def for_training(self, clients: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Return all clients as one group."""
        if len(clients):
            yield FEDERATION, clients


def secure_sums(
    experiment: Experiment, grid: Grid, roster: Roster, dropped: DroppedReplies | None = None
) -> _SecureSums | None:
    """Make the secure aggregation of an experiment; None without it.

    Raises:
        ExperimentError: there are fewer nodes than a sum needs.
    """
    settings = experiment.secure_aggregation
    if not settings:
        return None
    if len(roster.nodes) < settings.least_nodes:
        raise ExperimentError(
            "too few nodes for secure aggregation",
            expected=f"at least {settings.least_nodes} nodes (secure-aggregation.least-nodes)",
            got=f"{len(roster.nodes)}",
            fix=f"set engine.nodes = {settings.least_nodes} or more",
        )
    return _SecureSums(experiment, settings, grid, roster, dropped)


class _SecureSums:
    """Secure aggregation that replies to training orders with the sum of all nodes.

    Args:
        experiment: the resolved experiment.
        settings: settings of secure aggregation.
        grid: connection to the nodes.
        roster: the nodes and their clients; replaced when nodes join.
        dropped: records the nodes missing from a sum.
    """

    def __init__(
        self,
        experiment: Experiment,
        settings: SecureAggregationConfig,
        grid: Grid,
        roster: Roster,
        dropped: DroppedReplies | None = None,
    ) -> None:
        self.dropped = dropped or DroppedReplies()
        self.experiment = experiment
        self.settings = settings
        self.grid = grid
        self.roster = roster
        self._channels: dict[int, ChannelReply] = {}

    @property
    def whole(self) -> _WholeFederation:
        """Roster as strategies see it."""
        return _WholeFederation(self.roster.nodes, self.roster.presences)

    def send_and_receive(self, messages: Iterable[Message]) -> list[Message]:
        """Send training orders, and return one reply to each.

        Raises:
            ClientError: more nodes failed than engine.max-failures allows.
            ExperimentError: an order requests more than a sum.
        """
        return [
            Message(pack_sum(self._summed(message.content)), reply_to=message)
            for message in messages
        ]

    def _summed(self, content: RecordDict) -> TrainSum:
        order = unpack_order(TrainOrder, content)
        if order.clients is None or order.each:
            raise ExperimentError(
                "a training order requests more than a sum of updates",
                fix="leave out secure-aggregation, or set strategy.name = 'reptile'",
            )
        record = content.array_records[ARRAYS]
        theta = zero_copy_arrays(record)  # before the record is sent, and converted to bytes
        symmetric = symmetric_of(self.experiment, order.step)
        shapes = vector.shapes_of(theta, order.protection, symmetric)
        groups = dict(self.roster.for_training(order.clients))
        present = self._present(list(groups))
        heard = self._meet(present)
        nodes = [node for node in present if node in self._channels]
        counts = [len(groups[node]) for node in nodes]
        channels = [self._channels[node] for node in nodes]
        proofs = [channel.proof for channel in channels]
        largest = self.settings.largest
        bits = vector.session_bits(order.protection, sum(counts), len(counts), largest)
        session = Session(
            [channel.key for channel in channels],
            self.settings.quorum(len(nodes)),
            bits,
            counts,
            vector.digest_of(order, theta),
            proofs if any(proofs) else (),
        )
        heard += self._deal(session, nodes)
        orders = {
            rank: pack_order(replace(order, clients=groups[nodes[rank]], secure=masking), record)
            for rank, masking in session.mask_orders().items()
        }
        numbers = vector.length(shapes)
        masked, replies = self._ask(
            nodes, orders, MessageType.TRAIN, lambda reply: unpack_masked(reply, numbers)
        )
        most = self.experiment.engine.max_failures
        answers([*heard, *replies], sent=list(groups), max_failures=most, dropped=self.dropped)
        total = self._unmask(session, nodes, masked)
        if total is None:
            for rank in masked:
                self.dropped.dropped(nodes[rank], "the round has no sum")
            log.warning(
                "round %d has no sum: %d of the %d participating nodes sent one, and %d must"
                " complete the session",
                order.round,
                len(masked),
                len(nodes),
                session.quorum,
            )
            return _nothing(shapes)
        return vector.decoded(total, shapes, bits)

    def _present(self, nodes: Sequence[int]) -> list[int]:
        """Select the online nodes; if they are too few for a sum, wait for more, up to the
        deadline. Otherwise rounds without a sum would follow each other immediately, and each would
        be charged."""
        waited = 0.0
        pauses = Backoff(_FIRST_LOOK, _LAST_LOOK, growth=2.0)
        while True:
            there = set(self.grid.get_node_ids())
            online = [node for node in nodes if node in there]
            enough = len(online) >= min(self.settings.least_nodes, len(nodes))
            if enough or waited >= self.experiment.engine.timeout:
                return online
            pause = pauses.next()
            time.sleep(pause)
            waited += pause

    def _meet(self, nodes: Iterable[int]) -> list[Message]:
        """Request the channel keys of new nodes; returns the errors among the replies."""
        new = [node for node in nodes if node not in self._channels]
        contents = {rank: RecordDict() for rank in range(len(new))}
        keys, replies = self._ask(
            new, contents, SECURE_CHANNEL, partial(unpack_words, ChannelReply, key=KEY_BYTES)
        )
        self._channels |= {new[rank]: key for rank, key in keys.items()}
        return [reply for reply in replies if reply.has_error()]

    def _deal(self, session: Session, nodes: Sequence[int]) -> list[Message]:
        """Run the first exchange of a session; returns the errors among the replies."""
        orders = {rank: pack_order(order) for rank, order in session.share_orders().items()}
        lengths = {"mask_key": KEY_BYTES, "commitment": KEY_BYTES}
        lengths["sealed"] = session.nodes * SEALED_BYTES
        read = partial(unpack_words, ShareReply, **lengths)
        dealt, replies = self._ask(nodes, orders, SECURE_SHARES, read)
        session.dealt = dealt
        errors = [reply for reply in replies if reply.has_error()]
        for reply in errors:  # for example, it has lost its secrets and will have another key
            self._channels.pop(reply.metadata.src_node_id, None)
        return errors

    def _unmask(
        self, session: Session, nodes: Sequence[int], masked: Mapping[int, np.ndarray]
    ) -> np.ndarray | None:
        """Run the third exchange of a session, and return the sum; None if it fails."""
        orders = {rank: pack_order(order) for rank, order in session.unmask_orders(masked).items()}
        read = partial(unpack_words, UnmaskReply, shares=session.nodes * SEED_BYTES)
        answers, replies = self._ask(nodes, orders, SECURE_UNMASK, read)
        for reply in replies:
            if reply.has_error():
                log.warning(
                    "node %d did not send shares for unmasking: %s",
                    reply.metadata.src_node_id,
                    reply.error.reason,
                )
        return session.unmasked(masked, answers)

    def _ask(
        self,
        nodes: Sequence[int],
        contents: Mapping[int, RecordDict],
        kind: str,
        read: Callable[[RecordDict], Read],
    ) -> tuple[dict[int, Read], list[Message]]:
        """Send a message to each of some nodes.

        Args:
            nodes: Flower's id of each node, by position.
            contents: content of each message, by position of the node.
            kind: message type.
            read: parses a reply; raises an error if it is malformed.

        Returns:
            Parsed replies, by position; and all replies, with an error for each malformed one.
        """
        messages = [Message(content, nodes[rank], kind) for rank, content in contents.items()]
        if not messages:
            return {}, []
        sent = {message.metadata.dst_node_id: message for message in messages}
        ranks = {nodes[rank]: rank for rank in contents}
        parsed: dict[int, Read] = {}
        replies: list[Message] = []
        for reply in self.grid.send_and_receive(messages, timeout=self.experiment.engine.timeout):
            node = reply.metadata.src_node_id
            if not reply.has_error():
                try:
                    parsed[ranks.pop(node)] = read(reply.content)  # a second reply is rejected
                except Exception as error:  # untrusted input may be anything
                    reason = f"the reply to {kind} is dropped: {error}"
                    log.warning("node %d: %s", node, reason)
                    reply = Message(Error(_UNREADABLE, reason), reply_to=sent[node])
            replies.append(reply)
        return dict(sorted(parsed.items())), replies


def _nothing(shapes: vector.Shapes) -> TrainSum:
    """Sum of a round without replies."""
    return TrainSum(
        {name: np.zeros(shape_of.shape) for name, shape_of in shapes.items()}, 0, 0.0, 0, 0.0, 0
    )
