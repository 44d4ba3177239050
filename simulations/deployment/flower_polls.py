# SPDX-License-Identifier: Apache-2.0
"""Patches of Flower's state: polls, records, old messages, and replies of a SuperNode."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, NamedTuple

import flwr.app
import uvicorn
from flwr.app import Error, Message
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.supernode.nodestate import nodestate_factory
from sqlalchemy import bindparam, text
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from simulations.deployment.flower_patches import ticking
from simulations.deployment.health import WorkSignal
from simulations.deployment.pki import NodeSignature

# Fast replies to nodes that poll while they have no message, without using the database.
#
# Missing in Flower: polls that the SuperLink holds until there is a message (long polling). Most
# calls to a SuperLink with many nodes are of this kind. In Flower each passes nine middlewares and
# two threads, and writes to the database to mark messages as delivered, although there are none:
# some 10 ms of the one core that a SuperLink can use. Here the same authentication comes first;
# then the call is answered from an in-memory table of nodes without messages, and every other call
# is handled by Flower.
#
# The reply is held until a message is stored for the node, for at most `HELD` seconds (long
# polling), so that an idle node polls twice a minute and still learns of a message at once. The
# reply is always empty: the node polls again, with a new signature, and that call returns the
# message, so none is lost if a held call has been abandoned.

PULL = "/v1/fleet/pull-messages"
"""Path of the call with which a node polls for a message."""
PROTOBUF = "application/protobuf"
BELIEVED = 60.0
"""Seconds after which the database is asked again whether there is a message for a node."""
HELD = 25.0
"""Largest number of seconds until a node without messages is answered; its call would fail after
30."""


class HeldCall(NamedTuple):
    """A call of a node that waits for a message.

    Attributes:
        loop: the event loop that answers it.
        ended: set to answer it.
    """

    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event

    def end(self) -> None:
        """Answer it; may be called from any thread."""
        self.loop.call_soon_threadsafe(self.ended.set)


class EmptyQueues:
    """Nodes without a message in the database, until one is stored for them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._until: dict[int, float] = {}
        self._stored: Counter[int] = Counter()
        self._held: dict[int, HeldCall] = {}
        self._closed = False

    def __contains__(self, node: int) -> bool:
        return self._until.get(node, 0.0) > self._clock()

    def stored(self, node: int) -> None:
        """A message for a node was written to the database."""
        with self._lock:
            self._stored[node] += 1
            self._until.pop(node, None)
            held = self._held.pop(node, None)
        if held is not None:
            held.end()

    def messages(self, node: int) -> int:
        """Number of messages stored for a node so far; read before the database is queried."""
        return self._stored[node]

    def none_found(self, node: int, messages: int) -> None:
        """Record that the database has no message for a node; ignored if one was stored since
        `messages` was read, because the query may have missed it."""
        with self._lock:
            if self._stored[node] == messages:
                self._until[node] = self._clock() + BELIEVED

    async def wait(self, node: int, seconds: float) -> None:
        """Wait until a message is stored for a node, or as long; a node waits in one call, its last
        one."""
        call = HeldCall(asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if self._closed or node not in self:
                return
            earlier = self._held.pop(node, None)
            self._held[node] = call
        if earlier is not None:
            earlier.end()
        try:
            await asyncio.wait_for(call.ended.wait(), seconds)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                if self._held.get(node) is call:
                    del self._held[node]

    def close(self) -> None:
        """Answer all held calls, and hold none from now on."""
        with self._lock:
            self._closed = True
            held = self._held
            self._held = {}
        for call in held.values():
            call.end()


class IdleNodes(linkstate_factory.SqlLinkState):  # type: ignore[misc]
    """The state of a SuperLink that knows, without its database, which nodes have no message."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.empty_queues = EmptyQueues()
        self.nodes: dict[bytes, int] = {}  # by their public keys; those that were looked up
        self._looking_up = Lock()

    def store_message_ins(self, message: flwr.app.Message) -> str | None:
        """As Flower's; ends the held call of the message's node."""
        try:
            return super().store_message_ins(message)
        finally:
            self.empty_queues.stored(message.metadata.dst_node_id)

    def store_message_and_object_tree(
        self, message: flwr.app.Message, *rest: Any
    ) -> tuple[bool, list[str]]:
        """As Flower's; the message can be found only when this transaction, the outer one, has
        ended."""
        try:
            return super().store_message_and_object_tree(message, *rest)
        finally:
            self.empty_queues.stored(message.metadata.dst_node_id)

    def get_message_ins(
        self, node_id: int, limit: int | None, *, run_id: int | None = None
    ) -> list[flwr.app.Message]:
        """As Flower's; records if there was no message."""
        stored = self.empty_queues.messages(node_id)
        found = super().get_message_ins(node_id, limit, run_id=run_id)
        if not found and run_id is None:
            self.empty_queues.none_found(node_id, stored)
        return found

    def get_node_id_by_public_key(self, public_key: bytes) -> int | None:
        """As Flower's; cached until a node is removed."""
        known = self.nodes.get(public_key)
        if known is not None:
            return known
        with self._looking_up:
            found = super().get_node_id_by_public_key(public_key)
            if found is not None:
                self.nodes[public_key] = found
        return found

    def delete_node(self, owner_aid: str, node_id: int) -> None:
        """As Flower's."""
        with self._looking_up:
            try:
                super().delete_node(owner_aid, node_id)
            finally:
                self.nodes.clear()


class AnswerIdleNodes:
    """ASGI middleware that answers polls of nodes without a message and passes on all other calls.

    Args:
        app: what it passes on to.
        state: the SuperLink's.
        held: most seconds until a node without messages is answered.
    """

    def __init__(self, app: ASGIApp, state: IdleNodes, held: float = HELD) -> None:
        self._app = app
        self._state = state
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        node = None
        if scope["type"] == "http" and scope["path"] == PULL and scope["method"] == "POST":
            node = self._without_messages(Headers(scope=scope))
        if node is None:
            await self._app(scope, receive, send)
            return
        await Request(scope, receive).body()
        await self._state.empty_queues.wait(node, self._held)
        await Response(b"", media_type=PROTOBUF)(scope, receive, send)  # no messages

    def _without_messages(self, headers: Headers) -> int | None:
        """The authenticated node that polls, if no message waits for it. Invalid calls are left to
        Flower."""
        signature = NodeSignature.of(headers)
        if signature is None or headers.get("content-type") != PROTOBUF:
            return None
        node = self._state.nodes.get(signature.key)
        if node is None or node not in self._state.empty_queues or signature.fault():
            return None
        return node


def answer_idle_nodes() -> None:
    """Let web servers of this process answer idle nodes first."""
    load = uvicorn.Config.load

    def loaded(config: uvicorn.Config) -> None:
        load(config)
        state = config.app.state.linkstate_factory.state()  # type: ignore[union-attr]
        config.loaded_app = AnswerIdleNodes(config.loaded_app, state)  # type: ignore[arg-type]

    uvicorn.Config.load = loaded  # type: ignore[method-assign]
    uvicorn.Server.main_loop = until_it_ends  # type: ignore[method-assign]


async def until_it_ends(self: uvicorn.Server) -> None:
    """Replaces uvicorn's `Server.main_loop`; at the end, held calls are answered, because the
    server would wait for them."""
    await ticking(self)
    state = self.config.app.state.linkstate_factory.state()  # type: ignore[union-attr]
    state.empty_queues.close()


# Records of bytes and of lost tasks, written to the SuperLink's database once a second.
#
# Missing in Flower: bookkeeping that is independent of the number of pieces. With every piece of a
# message it marks tasks without heartbeats, and adds up bytes, in a database with one writer at a
# time. With many nodes that was half of the SuperLink's work; here it is done for all pieces of a
# second. Of the bytes, which are shown and used for nothing else, those of a run's last second may
# be missing.

SETTLING = 1.0
"""Smallest number of seconds between two checks for lost tasks, and between two records of
transferred bytes."""


class Throttle:
    """Rate limit: one caller at a time, and none for some seconds after it.

    Args:
        seconds: pause after a caller.
        at_once: whether the first caller need not wait.
        clock: monotonic seconds.
    """

    def __init__(
        self, seconds: float, *, at_once: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._busy = Lock()
        self._next = clock() + (0.0 if at_once else seconds)

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, if it is due and no other caller does it."""
        if self._clock() >= self._next and self._busy.acquire(blocking=False):
            try:
                work()
            finally:
                self._next = self._clock() + self._seconds
                self._busy.release()


class RareWrites(linkstate_factory.SqlLinkState):  # type: ignore[misc]
    """The state of a SuperLink with fewer writes to its file."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._expiring = Throttle(SETTLING)
        self._entering = Throttle(SETTLING)
        self._bytes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._counting = Lock()

    def store_traffic(self, run_id: int, bytes_sent: int, bytes_recv: int) -> None:
        """As Flower's; written once a second."""
        with self._counting:
            counts = self._bytes[run_id]
            counts[0] += bytes_sent
            counts[1] += bytes_recv
        self._entering.run(self._enter_bytes)

    def _cleanup_expired_task_tokens(self) -> None:
        """As Flower's; at most once a second."""
        self._expiring.run(super()._cleanup_expired_task_tokens)

    def _enter_bytes(self) -> None:
        with self._counting:
            counted = self._bytes
            self._bytes = defaultdict(lambda: [0, 0])
        for run_id, (sent, received) in counted.items():
            with suppress(ValueError):  # the run was deleted
                super().store_traffic(run_id, bytes_sent=sent, bytes_recv=received)


# Deletes the pieces of expired messages.
#
# Missing in Flower: it deletes an expired message when it is requested, but keeps its parameters
# until the run ends: if nodes fail, half a megabyte per round of a small model. It also deletes a
# message before its reply has been read, and while a late reply is still being sent; so pieces are
# deleted `OVERDUE` seconds later.

OVERDUE = 120.0
TIDYING = 30.0
"""Seconds that the data of a message are kept after it expired; smallest number of seconds between
two clean-ups."""
_EXPIRED = text("SELECT message_id FROM message_ins WHERE created_at + ttl < :moment")
_ANSWERS = text(
    "SELECT message_id FROM message_res WHERE reply_to_message_id IN :messages"
).bindparams(bindparam("messages", expanding=True))


class OldMessages(linkstate_factory.SqlLinkState):  # type: ignore[misc]
    """The state of a SuperLink without pieces of expired messages."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._forgotten: deque[tuple[float, set[str]]] = deque()
        self._tidying = Throttle(TIDYING, at_once=False)

    def store_message_ins(self, message: Message) -> str | None:
        """As Flower's; also deletes the data of expired messages from time to time."""
        self._tidying.run(self._tidy)
        return super().store_message_ins(message)

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """As Flower's; records the messages whose pieces are to be deleted."""
        if not message_ins_ids:
            return
        with self.session() as session:
            found = session.execute(_ANSWERS, {"messages": list(message_ins_ids)})
            answers = {str(identifier) for identifier in found.scalars()}
            super().delete_messages(message_ins_ids)
        self._forgotten.append((time.monotonic(), message_ins_ids | answers))

    def _tidy(self) -> None:
        self.forget_overdue(time.time() - OVERDUE)
        self.drop_pieces(time.monotonic() - OVERDUE)

    def forget_overdue(self, moment: float) -> None:
        """Delete messages that expired before a time, in seconds since 1970, with their replies."""
        with self.session() as session:
            found = session.execute(_EXPIRED, {"moment": moment}).scalars()
            self.delete_messages({str(identifier) for identifier in found})

    def drop_pieces(self, moment: float) -> None:
        """Delete the pieces of messages that were deleted before a time of the monotonic clock, if
        any are left."""
        store = self.object_store
        while self._forgotten and self._forgotten[0][0] < moment:
            for identifier in self._forgotten.popleft()[1]:
                if identifier in store:
                    store.delete(identifier)


# A SuperNode that replies to every message once, and never with the reply to another one.
#
# Missing in Flower: a reply for a process that was killed together with its executor. The SuperNode
# works on one message at a time, and waits for any reply without end: the node would stay online
# and never take a message again. If a run is stopped while a message arrives, Flower's loop forgets
# the message but its state does not: the late reply would be sent as the reply to the next message.

_FINISHED = "finished"
_COMPLETED = "completed"  # status of a task, and that of a finished one, by Flower
_CRASHED = Error(8, "ClientApp stopped responding.")  # as Flower's for a lost process


class AnsweringState(nodestate_factory.InMemoryNodeState):  # type: ignore[misc]
    """The state of a SuperNode that replies to every message once.

    Args:
        object_store: as Flower's.
        work_signal: sent to the executor for each task.
    """

    _newest_task: int | None = None

    def __init__(self, object_store: Any, work_signal: WorkSignal | None = None) -> None:
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
                task.task_id for task in self.task_store.values() if task.status.status == _FINISHED
            ]:
                del self.task_store[known]
        created = super().create_task(*args, **kwargs)
        self._newest_task = created if created is not None else self._newest_task
        self._work_signal.send()
        return created

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """As Flower's; a task that failed late must not reply to the message after its own."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status != _COMPLETED and task_id == self._newest_task:
            runs = {task.run_id for task in self.get_tasks(task_ids=[task_id])}
            self._store_error_replies(runs, _CRASHED)
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
