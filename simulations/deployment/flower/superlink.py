# SPDX-License-Identifier: Apache-2.0
"""The SuperLink: longer timeouts for its database and for runs, and fewer writes and stored
data."""

from __future__ import annotations

import gc
import importlib
import resource
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any

from flwr.app import Message
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import select
from starlette.middleware import Middleware
from uvicorn import Server

from simulations.deployment.flower import direct_middleware, pieces
from simulations.deployment.flower.idle_polls import AnswerIdleNodes, EmptyQueues
from simulations.deployment.flower.pace import ticking

TASK_SILENCE = 150.0
"""Half of the seconds without a heartbeat after which the SuperLink regards a ServerApp as lost
(Flower: 30); long enough for a machine to be suspended for some minutes. The executor reports a
ServerApp that ended immediately."""
DATABASE_WAIT_MS = 60_000
"""Milliseconds that the SuperLink waits for a lock on its database."""
OVERDUE = 120.0
TIDYING = 30.0
"""Seconds that the data of a message are kept after it expired; smallest number of seconds between
two clean-ups."""
GARBAGE = (50_000, 20, 20)
"""Thresholds of the garbage collector: new objects, and collections before older generations are
collected (Python: 700, 10, 10)."""
SETTLING = 1.0
"""Smallest number of seconds between two checks for lost tasks, and between two records of
transferred bytes."""

# Imported by name, because their packages define functions of the same names.
linkstate_factory: Any = importlib.import_module(
    "flwr.server.superlink.linkstate.linkstate_factory"
)
sql_corestate: Any = importlib.import_module("flwr.supercore.corestate.sql_corestate")
sql_mixin: Any = importlib.import_module("flwr.supercore.sql_mixin")


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


class TidyLinkState(SqlLinkState):
    """The SuperLink's state without pieces of expired messages, and with fewer writes to its file.

    Flower deletes such a message when it is requested, but keeps its parameters until the run ends:
    if nodes fail, half a megabyte per round of a small model. It also deletes a message before its
    reply has been read, and while a late reply is still being sent; so pieces are deleted `OVERDUE`
    seconds later.

    With every piece of a message Flower also writes to its database, of which there is one writer
    at a time: it marks tasks without heartbeats, and adds up bytes. With many nodes that was
    half of the SuperLink's work; here it is done for all pieces of a second. Of the bytes, which
    are shown and used for nothing else, those of a run's last second may be missing.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._forgotten: deque[tuple[float, set[str]]] = deque()
        self._tidying = Throttle(TIDYING, at_once=False)
        self._expiring = Throttle(SETTLING)
        self._entering = Throttle(SETTLING)
        self._bytes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._counting = Lock()
        self.empty_queues = EmptyQueues()
        self._nodes: dict[bytes, int] = {}
        self._registering = Lock()

    def store_message_ins(self, message: Message) -> str | None:
        """As Flower's; also deletes the data of expired messages from time to time."""
        self._tidying.run(self._tidy)
        try:
            return super().store_message_ins(message)
        finally:
            self.empty_queues.stored(message.metadata.dst_node_id)

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        """As Flower's; the message can be found only when this transaction, the outer one, has
        ended."""
        try:
            return super().store_message_and_object_tree(message, object_tree, session_id)
        finally:
            self.empty_queues.stored(message.metadata.dst_node_id)

    def get_message_ins(
        self, node_id: int, limit: int | None, *, run_id: int | None = None
    ) -> list[Message]:
        """As Flower's; records if there was no message."""
        stored = self.empty_queues.messages(node_id)
        found = super().get_message_ins(node_id, limit, run_id=run_id)
        if not found and run_id is None:
            self.empty_queues.none_found(node_id, stored)
        return found

    def get_node_id_by_public_key(self, public_key: bytes) -> int | None:
        """As Flower's; cached until a node is removed."""
        known = self._nodes.get(public_key)
        if known is not None:
            return known
        with self._registering:
            found = super().get_node_id_by_public_key(public_key)
            if found is not None:
                self._nodes[public_key] = found
        return found

    def delete_node(self, owner_aid: str, node_id: int) -> None:
        """As Flower's."""
        with self._registering:
            try:
                super().delete_node(owner_aid, node_id)
            finally:
                self._nodes.clear()

    def store_traffic(self, run_id: int, bytes_sent: int, bytes_recv: int) -> None:
        """As Flower's; written once a second."""
        with self._counting:
            counts = self._bytes[run_id]
            counts[0] += bytes_sent
            counts[1] += bytes_recv
        self._entering.run(self._enter_bytes)

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """As Flower's; records the messages whose pieces are to be deleted."""
        if not message_ins_ids:
            return
        answered = MessageRes.reply_to_message_id.in_(message_ins_ids)
        with self.session() as session:
            answers = {
                str(found)
                for found in session.scalars(select(MessageRes.message_id).where(answered))
            }
            super().delete_messages(message_ins_ids)
        self._forgotten.append((time.monotonic(), message_ins_ids | answers))

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

    def _tidy(self) -> None:
        self.forget_overdue(time.time() - OVERDUE)
        self.drop_pieces(time.monotonic() - OVERDUE)

    def forget_overdue(self, moment: float) -> None:
        """Delete messages that expired before a time, in seconds since 1970, with their replies."""
        ends = MessageIns.created_at + MessageIns.ttl
        with self.session() as session:
            found = session.scalars(select(MessageIns.message_id).where(ends < moment))
            self.delete_messages({str(identifier) for identifier in found})

    def drop_pieces(self, moment: float) -> None:
        """Delete the pieces of messages that were deleted before a time of the monotonic clock, if
        any are left."""
        while self._forgotten and self._forgotten[0][0] < moment:
            for identifier in self._forgotten.popleft()[1]:
                if identifier in self.object_store:
                    self.object_store.delete(identifier)


async def until_it_ends(self: Server) -> None:
    """Replaces uvicorn's `Server.main_loop`; at the end, held calls are answered, because the
    server would wait for them."""
    await ticking(self)
    state = self.config.app.state.linkstate_factory.state()  # type: ignore[union-attr]
    state.empty_queues.close()


def superlink(arguments: list[str]) -> None:
    """`flower-superlink` that waits longer for its database than 5 s, and for its runs than a
    minute."""
    direct_middleware.use()
    for handlers in (fleet_handlers, runtime_handlers):
        pieces.answer(handlers)
    linkstate_factory.SqlLinkState = TidyLinkState
    usual = extensions.get_middleware
    extensions.get_middleware = lambda: (*usual(), Middleware(AnswerIdleNodes))
    sql_corestate.HEARTBEAT_DEFAULT_INTERVAL = TASK_SILENCE
    kept = [(name, value) for name, value in sql_mixin.SQLITE_PRAGMAS if name != "busy_timeout"]
    sql_mixin.SQLITE_PRAGMAS = (("busy_timeout", str(DATABASE_WAIT_MS)), *kept)
    Server.main_loop = until_it_ends
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each waiting node
    sys.argv = ["flower-superlink", *arguments]
    gc.collect()
    # excludes the modules imported so far from garbage collection, a seventh of the work;
    # collections are rarer, as each goes over objects of the web framework and SQLAlchemy
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    flower_superlink()
