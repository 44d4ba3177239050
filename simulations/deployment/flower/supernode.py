# SPDX-License-Identifier: Apache-2.0
"""The SuperNode: shorter waits, faster heartbeats, and one reply to every message."""

from __future__ import annotations

import importlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import httpx
from flwr.app import Error, Message
from flwr.common.constant import Status, SubStatus
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse
from flwr.supercore import heartbeat
from flwr.supercore.object_store import ObjectStore
from flwr.supernode import fleet_http_connection
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate import in_memory_nodestate
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.servicer.runtime import runtime_handlers
from uvicorn import Server

from fedrec.runtime.backoff import Backoff
from simulations.deployment.flower import direct_middleware, pieces
from simulations.deployment.flower.pace import PacedTime, ticking
from simulations.deployment.flower.work_signal import WorkSignal

FLOWER_POLL = 3.0
"""Seconds that Flower's SuperNode sleeps between two polls; shorter sleeps wait for a reply."""
FIRST_POLL = 0.1
"""Seconds after a message until the SuperNode polls for the next one."""
HELD_LONG = 5.0
"""Seconds after which an empty reply counts as held by the SuperLink."""
FIRST_LOOK = 0.03
LONGEST_LOOK = 0.5
"""Seconds between two checks for the reply to a message (Flower: .5)."""
REFUSED = 77
"""Exit status of a SuperNode whose key the server does not accept."""
KEPT = 60.0
"""Seconds that an unused connection to the server is kept; the gateway ends it after 75."""
HEARTBEAT = 15.0
"""Seconds between a node's heartbeats (Flower's default is 30, its minimum 10); a node is lost
after two. With shorter intervals a killed node is replaced earlier; with longer ones the SuperLink
may be offline for longer before it regards nodes as lost."""

# Imported by name, because their packages define functions of the same names.
nodestate_factory: Any = importlib.import_module("flwr.supernode.nodestate.nodestate_factory")
start_client_internal: Any = importlib.import_module("flwr.supernode.start_client_internal")
importlib.import_module("flwr.supernode.main")  # otherwise imported by each SuperNode


class NodePace:
    """Sleep times of the SuperNode: short after a message and growing while idle; likewise while it
    waits for a reply.

    A poll that took long was held by the SuperLink, so the next poll follows at once.

    Args:
        longest: largest number of seconds between two polls for a message.
        clock: monotonic seconds.
    """

    def __init__(
        self, longest: float = FLOWER_POLL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._message = Backoff(FIRST_POLL, longest, growth=1.3)
        self._reply = Backoff(FIRST_LOOK, LONGEST_LOOK)
        self._clock = clock
        self._asked = clock()

    def __call__(self, seconds: float) -> float:
        """Seconds to sleep instead of Flower's."""
        if seconds < FLOWER_POLL:  # it waits for the reply to a message, so it is not idle
            self._message.restart()
            return min(seconds, self._reply.next())
        self._reply.restart()
        if self._clock() - self._asked > HELD_LONG:
            self._message.restart()
        pause = self._message.next()
        self._asked = self._clock() + pause
        return pause


class KeptConnections(FleetHttpClient):
    """A SuperNode's calls, whose connection is kept between polls: httpx would close it after 5 s,
    and each poll would begin with a TLS handshake. If the server does not accept the node's key,
    the process ends with the status `REFUSED`."""

    def __init__(self, base_url: str, *, verify: Any = True, **settings: Any) -> None:
        super().__init__(base_url, verify=verify, **settings)
        usual = self._client
        limits = httpx.Limits(max_keepalive_connections=2, keepalive_expiry=KEPT)
        self._client = httpx.Client(
            verify=verify, timeout=usual.timeout, follow_redirects=True, limits=limits
        )
        usual.close()

    def ActivateNode(self, request: ActivateNodeRequest) -> ActivateNodeResponse:
        """As Flower's, which ends with a status that other failures have too."""
        try:
            return super().ActivateNode(request)
        except httpx.HTTPStatusError as error:
            if not 400 <= error.response.status_code < 500:
                raise
            print(f"the server does not accept this node's key: {error}", file=sys.stderr)
            sys.exit(REFUSED)


class AnsweringNodeState(InMemoryNodeState):
    """A SuperNode's state that replies to every message once, and never with the reply to another
    one.

    Flower's SuperNode works on one message at a time, and waits for any reply without end. A
    process that was killed together with its executor sends none: the node would stay online and
    never take a message again. If a run is stopped while a message arrives, Flower's loop forgets
    the message but its state does not: the late reply would be sent as the reply to the next
    message.
    """

    _newest_task: int | None = None

    def __init__(self, object_store: ObjectStore, work_signal: WorkSignal | None = None) -> None:
        super().__init__(object_store)
        self._work_signal = work_signal or WorkSignal(None)
        self._forgotten: deque[str] = deque(maxlen=1000)

    def store_message(self, message: Message) -> str | None:
        """As Flower's; a new message ends those before it."""
        if not message.metadata.reply_to_message_id:
            with self.lock_msg_store:
                stale = [
                    identifier
                    for identifier in self.msg_store
                    if identifier != message.metadata.message_id
                ]
                self._forgotten.extend(stale)
                self.delete_messages(message_ids=stale)
            for identifier in stale:
                self.object_store.delete(identifier)
        return super().store_message(message)

    def get_messages_legacy(self, **asked: Any) -> Sequence[Message]:
        """As Flower's, without replies to ended messages."""
        found = super().get_messages_legacy(**asked)
        return [
            message
            for message in found
            if message.metadata.reply_to_message_id not in self._forgotten
        ]

    def create_task(self, *args: Any, **kwargs: Any) -> int | None:
        """As Flower's, which keeps all tasks; there is one message, and so one task, at a time. The
        work signal wakes the executor."""
        with self.lock_task_store:
            for known in [
                task.task_id
                for task in self.task_store.values()
                if task.status.status == Status.FINISHED
            ]:
                del self.task_store[known]
        created = super().create_task(*args, **kwargs)
        self._newest_task = created if created is not None else self._newest_task
        self._work_signal.send()
        return created

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """As Flower's; a task that failed late must not reply to the message after its own."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status != SubStatus.COMPLETED and task_id == self._newest_task:
            runs = {task.run_id for task in self.get_tasks(task_ids=[task_id])}
            self._store_error_replies(runs, in_memory_nodestate.CLIENT_APP_CRASHED_ERROR)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """As Flower's, which omits messages that the process had not fetched yet."""
        with self.lock_msg_store:
            for entry in self.msg_store.values():
                if (
                    entry.message.metadata.run_id in run_ids
                    and not entry.message.metadata.reply_to_message_id
                ):
                    entry.is_retrieved = True
            super()._store_error_replies(run_ids, error)


def supernode(arguments: list[str], longest_poll: float, work_signal: WorkSignal) -> None:
    """`flower-supernode` with shorter waits, faster heartbeats, and a reply to every message.

    Args:
        arguments: of `flower-supernode`.
        longest_poll: largest number of seconds between two polls for a message.
        work_signal: sent to the executor.
    """
    direct_middleware.use()
    start_client_internal.time = PacedTime(NodePace(longest_poll))  # type: ignore[attr-defined]
    Server.main_loop = ticking
    pieces.use(start_client_internal)
    pieces.answer(runtime_handlers)
    fleet_http_connection.FleetHttpClient = KeptConnections  # type: ignore[attr-defined]
    nodestate_factory.InMemoryNodeState = partial(AnsweringNodeState, work_signal=work_signal)
    for module in (heartbeat, fleet_http_connection):
        module.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT  # type: ignore[attr-defined]
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()
