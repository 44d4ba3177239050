# SPDX-License-Identifier: Apache-2.0
"""Federation of real nodes, which join and leave and are untrusted, and the connection to them."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import numpy as np
from flwr.app import ArrayRecord, Message, Metadata
from flwr.serverapp import Grid

from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.protocol.messages import TrainOrder, unpack_order
from fedrec.protocol.serialization import for_the_network, from_the_network
from fedrec.runs.folder import RunFolder
from fedrec.runtime.process import Backoff
from server.deployed.discovery import MOST_CLIENTS, Discovery, most_common_parameters
from server.deployed.validation import ReplyValidator
from server.federation import AsynchronousFederation, Federation
from server.nodes import Roster


def federation_of(run: RunFolder, grid: Grid) -> Federation:
    """Make the federation of a grid's nodes, simulated or real.

    Raises:
        ExperimentError: the nodes are real, the noise depends on their number of clients, and the
            deployment does not limit the number of clients per node.
    """
    if isinstance(grid, DeployedGrid):
        return DeployedFederation(run, grid)
    asynchronous = run.experiment.asynchronous is not None
    return (AsynchronousFederation if asynchronous else Federation)(run.experiment, grid)


class DeployedFederation(Federation):
    """Federation of a deployment's nodes.

    Args:
        run: the run folder; contains the roster.
        grid: connection to the nodes.
    """

    untrusted = True

    def __init__(self, run: RunFolder, grid: DeployedGrid) -> None:
        experiment = run.experiment
        _check_simulated(experiment)
        _check_registered(experiment, grid)
        self.discovery = Discovery(
            grid,
            run.path / "roster.npz",
            timeout=experiment.engine.timeout,
            most=grid.most_clients or MOST_CLIENTS,
        )
        super().__init__(experiment, grid)
        self._deployed = grid
        self.validator = ReplyValidator(self.dropped)

    def refresh_roster(self) -> bool:
        """Look for new nodes; returns True if `roster` has changed."""
        if not self.discovery.refresh_roster():
            return False
        self.roster = self.discovery.roster
        if self.secure is not None:
            self.secure.roster = self.roster
        return True

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """Return the initial parameters of the majority of a few nodes.

        Raises:
            ClientError: no node returns finite parameters.
        """
        return most_common_parameters(self.grid, self.roster, timeout=self.timeout)

    def train(self, messages: Sequence[Message], theta: Mapping[str, np.ndarray]) -> list[Message]:
        """Train as in `Federation`.

        Raises:
            ExperimentError: a node would get several messages in one round.
            ClientError: more nodes failed than `engine.max-failures` allows.
        """
        _check_single_messages(messages)
        return super().train(messages, theta)

    def _exchange(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Iterable[Message]]:
        """Send messages as in `Federation`; with `[closing]`, until the round closes."""
        closing = self.experiment.closing
        if closing is None or not messages:
            return super()._exchange(messages)
        asked = {message.metadata.dst_node_id: _clients_in(message) for message in messages}
        needed = closing.needed(sum(asked.values()))
        replies = self._deployed.send_and_receive(
            messages,
            timeout=self.timeout if closing.deadline is None else closing.deadline,
            enough=lambda good: sum(asked[reply.metadata.src_node_id] for reply in good) >= needed,
        )
        return messages, replies

    def _timeline(self) -> None:
        """Return None: real nodes have no simulated time."""

    def _first_roster(self) -> Roster:
        return self.discovery.wait_for(self.experiment.engine.nodes or 1)

    def _valid(
        self, messages: Sequence[Message], replies: list[Message], theta: Mapping[str, np.ndarray]
    ) -> list[Message]:
        return self.validator.trained(messages, replies, theta)


def _check_simulated(experiment: Experiment) -> None:
    """Check that the experiment has no table for simulated devices."""
    for name in ("compression", "devices", "asynchronous"):
        if getattr(experiment, name) is not None:
            instead = "; [closing] with a deadline does not wait for slow devices"
            raise ExperimentError(
                f"[{name}] applies only to simulated devices, and these nodes are real",
                fix="leave it out" + ("" if name == "compression" else instead),
            )


def _check_registered(experiment: Experiment, grid: DeployedGrid) -> None:
    """Check that no node can reduce the noise by claiming more clients, which seems to lower the
    sampling rate."""
    privacy = experiment.privacy
    if privacy is not None and privacy.placement != "local" and grid.most_clients is None:
        raise ExperimentError(
            "noise depends on the number of clients, and this deployment does not limit the clients"
            " per node",
            fix="set most-clients in deployment.toml to the largest number of users of a node",
        )


def _clients_in(message: Message) -> int:
    """Number of clients in a training order; an order for all clients of a node counts as one."""
    clients = unpack_order(TrainOrder, message.content).clients
    return 1 if clients is None else len(clients)


def _check_single_messages(messages: Sequence[Message]) -> None:
    """Check that a strategy sends each node one message, as only one reply is accepted."""
    counts = Counter(message.metadata.dst_node_id for message in messages)
    for node, count in counts.items():
        if count > 1:
            raise ExperimentError(
                f"the strategy sends node {node} {count} messages in one round; only one reply is"
                " accepted",
                fix="for the update of each client, set `reply = 'each'` in the strategy's class"
                " (docs/plugins.md); or set strategy.name = 'reptile'",
            )


# Flower's grid over real nodes, with packed arrays, frequent polls, and no messages to offline
# nodes.
#
# Flower's own `send_and_receive` polls for replies every 3 s, and waits for a node known to be
# offline until its message expires.

log = logging.getLogger("fedrec")
_FIRST_POLL = 0.1
_LAST_POLL = 2.0
_GROWTH = 1.3
_LONGEST_PAUSE = 16
_AT_ONCE = 4
"""Number of messages sent at a time. A node polls for the pieces of its message once it is
announced, and a hundred polling nodes keep the SuperLink from receiving these pieces."""
_EXPIRED = (3, 4)
"""Flower's error codes for an expired message or reply; errors of a node have other codes."""
SUPERLINK = 1
"""Flower's id of its SuperLink, which replies for lost nodes."""
_SERVER_PATIENCE = 120.0  # seconds to repeat failing calls to the SuperLink


class DeployedGrid(Grid):
    """Flower's grid over real nodes, with the loop's timeouts.

    Args:
        grid: Flower's.
        most_clients: largest number of clients of a node; None: not registered.
        node_names: names of the nodes for people, by Flower's id.
        clock: monotonic seconds.
        sleep: function that waits.
    """

    def __init__(
        self,
        grid: Grid,
        most_clients: int | None = None,
        node_names: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._grid = grid
        self.most_clients = most_clients
        self.node_names = node_names or {}
        self._clock = clock
        self._sleep = sleep
        self._missed: dict[int, int] = {}
        self._pauses: dict[int, int] = {}

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Ids of the nodes with a recent heartbeat."""
        return self._patiently(lambda: list(self._grid.get_node_ids()))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return list(self._push(list(messages), math.inf))

    def _push(self, messages: list[Message], deadline: float) -> dict[str, Message]:
        """Push messages that expire at a deadline; repeated while the server is offline. Returns
        those that were sent by then, by identifier."""
        packed: dict[int, ArrayRecord] = {}
        for message in messages:
            for_the_network(message.content, packed)

        pushed: dict[str, Message] = {}
        for first in range(0, len(messages), _AT_ONCE):
            left = deadline - self._clock()
            if left <= 0:
                log.warning("%d messages were not sent before the deadline", len(messages) - first)
                break
            some = messages[first : first + _AT_ONCE]
            identifiers = self._patiently(partial(self._push_some, some, left))
            pushed.update(zip(identifiers, some, strict=True))
        return pushed

    def _push_some(self, messages: list[Message], timeout: float) -> list[str]:
        if timeout < math.inf:
            for message in messages:
                _live(message.metadata, timeout)
        return list(self._grid.push_messages(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = list(message_ids)
        replies = self._patiently(lambda: list(self._grid.pull_messages(wanted)))
        for reply in replies:
            if reply.has_content():
                from_the_network(reply.content)
        return replies

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,
        enough: Callable[[Sequence[Message]], bool] | None = None,
    ) -> Iterable[Message]:
        """Send messages, and return the replies that arrive before the deadline, at most one per
        message; sending is part of the time. A message to an offline node is not sent and counts as
        unanswered. A node that missed a deadline gets no message the next 1, 2, 4, ... up to 16
        times, as every round would wait for it.

        Args:
            messages: one for each node.
            timeout: seconds; None: without a deadline.
            enough: returns True if the replies without errors so far are enough and waiting ends;
                other nodes then have not missed a deadline.
        """
        messages = list(messages)
        if not messages:
            return []
        online = self._present(timeout)
        sent = [m for m in messages if self._asks(m.metadata.dst_node_id, online)]
        # With a time to live: a node that comes online later must not work on an expired message.
        deadline = math.inf if timeout is None else self._clock() + timeout
        waiting = self._push(sent, deadline)
        replies: list[Message] = []
        pauses = Backoff(_FIRST_POLL, _LAST_POLL, _GROWTH)
        while waiting:
            # Poll once more after a deadline: pulling one reply in pieces may have delayed others.
            late = self._clock() >= deadline
            arrived = self._arrived(waiting)
            replies += arrived
            if enough is not None and enough([reply for reply in replies if not reply.has_error()]):
                break
            if late:
                for message in waiting.values():
                    self._missed_by(message.metadata.dst_node_id)
                break
            if arrived:
                pauses.restart()
            if waiting:
                self._sleep(max(0.0, min(pauses.next(), deadline - self._clock())))
        return replies

    def _arrived(self, waiting: dict[str, Message]) -> list[Message]:
        """Poll once for replies, which may be errors of nodes. Each has the group of its message,
        whatever the node sent.

        Args:
            waiting: messages by identifier; those with a reply are removed.
        """
        arrived = []
        for reply in self.pull_messages(list(waiting)):
            asked = waiting.pop(reply.metadata.reply_to_message_id, None)
            if asked is None:  # a second reply to a message is ignored
                continue
            node = asked.metadata.dst_node_id
            if reply.has_error() and reply.error.code in _EXPIRED:
                self._missed_by(node)
                continue
            reply.metadata.group_id = asked.metadata.group_id
            if reply.has_error() and reply.metadata.src_node_id == SUPERLINK:
                # the SuperLink replies for a lost node
                reply.metadata.__dict__["_src_node_id"] = node
            arrived.append(reply)
            self._missed[node] = 0
        return arrived

    def _missed_by(self, node: int) -> None:
        """Record that a node missed a deadline."""
        self._missed[node] = self._missed.get(node, 0) + 1
        self._pauses[node] = min(2 ** (self._missed[node] - 1), _LONGEST_PAUSE)
        log.warning("node %d missed the deadline; it is skipped %d times", node, self._pauses[node])

    def _present(self, timeout: float | None) -> set[int]:
        """Return the online nodes. If none is online, or none replied recently, the server was
        offline and not the nodes. Then this waits for the first node, up to the deadline; otherwise
        rounds without participants would follow each other immediately, and each would be
        charged."""
        until = self._clock() + (_SERVER_PATIENCE if timeout is None else timeout)
        pauses = Backoff(_FIRST_POLL, _LAST_POLL, _GROWTH)
        while not (there := set(self.get_node_ids())) and self._clock() < until:
            self._sleep(min(pauses.next(), until - self._clock()))
        if there and all(self._pauses.get(node, 0) for node in there):
            self._pauses.clear()
            self._missed.clear()
        return there

    def _patiently(self, call: Callable[[], list[Any]]) -> list[Any]:
        """Repeat a call of Flower's when the SuperLink fails; Flower itself repeats only calls that
        reach no server."""
        until = self._clock() + _SERVER_PATIENCE
        pauses = Backoff(1.0, 10.0, growth=2.0)
        while True:
            try:
                return call()
            except Exception as error:
                if not _passes(error) or self._clock() >= until:
                    raise
                log.warning("the SuperLink failed (%s); retrying", error)
            self._sleep(pauses.next())

    def _asks(self, node: int, there: set[int]) -> bool:
        """True if a node gets a message: it is online, and has not just missed a deadline."""
        left = self._pauses.get(node, 0)
        self._pauses[node] = max(0, left - 1)
        return left == 0 and node in there


def _live(metadata: Metadata, seconds: float) -> None:
    """Set a message's time to live; one valid for at least half of it keeps its value, and so its
    id: a SuperLink that already has a part of the message takes the rest under the same id."""
    age = time.time() - metadata.created_at
    if not seconds / 2 <= metadata.ttl - age <= seconds:
        metadata.ttl = age + seconds


def _passes(error: Exception) -> bool:
    """Return True if a call may succeed when repeated: the server failed, or lost the state of an
    upload."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return type(error).__name__ == "ObjectPushError"
