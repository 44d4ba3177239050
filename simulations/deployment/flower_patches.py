# SPDX-License-Identifier: Apache-2.0
"""Patches of Flower's processes: sleep times, executors, heartbeats, own code, replies of a
SuperNode, many pieces of a message in one call, and held polls of idle nodes."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import flwr.app
import httpx
import uvicorn
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.supercore import heartbeat
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.supernode.nodestate import nodestate_factory
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Server

from fedrec.runtime.process import Backoff, Fork
from simulations.deployment.pki import NodeSignature

# Sleep times of Flower's polling loops, and of the web server in a SuperNode.
#
# Missing in Flower: settings for them. A SuperNode polls every 3 s, and looks for a reply every .5
# s.

TICK = 1.0
"""Seconds between two checks of a web server for its end (uvicorn: .1, which is most of the cost of
an idle SuperNode)."""


class PacedTime:
    """Replacement of the module `time` in one of Flower's loops.

    Args:
        pace: maps the loop's sleep time to the actual one, in seconds.
    """

    def __init__(self, pace: Callable[[float], float]) -> None:
        self._pace = pace

    def sleep(self, seconds: float) -> None:
        """Sleep for the mapped time."""
        time.sleep(self._pace(seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


async def ticking(self: Server) -> None:
    """Run as uvicorn's `Server.main_loop`, with longer sleeps."""
    while not await self.on_tick(0):
        await asyncio.sleep(TICK)


# An executor that runs each task in a fork of its process, with all modules imported.
#
# Missing in Flower: an executor that does not start a new Python for a task, that reports a killed
# task at once, and that survives a failed call.

AGAIN = 1.0
"""Seconds until a call that failed on the server is repeated."""

# Imported by name, because their packages define functions of the same names.
run_superexec: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
run_clientapp: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")


def use_own_loop(executor: ForkExecutor, backoff: Backoff) -> None:
    """Replace Flower's executor in this process."""
    run_superexec.RuntimeHttpClient = TolerantClient
    run_superexec.time = PacedTime(lambda _: backoff.next())
    run_superexec.get_executor = lambda *_, **__: executor


class ForkExecutor:
    """Runs each task in a fork of this process, which has imported all modules.

    Args:
        kind: kind of its tasks, by the name of Flower's command for them.
        become: runs a task in the fork.
        backoff: the sleeps between two polls for a task.
    """

    def __init__(self, kind: str, become: Callable[[Any], None], backoff: Backoff) -> None:
        self._kind = kind
        self._become = become
        self._backoff = backoff
        self._children: dict[Fork, Any] = {}

    def get_eligible_capacity(
        self, supported_task_types: set[str], **_: Any
    ) -> tuple[set[str], set[str]]:
        """Capacity for tasks of one kind."""
        return {kind for kind in supported_task_types if kind == self._kind}, set()

    def launch(self, spec: Any) -> Any:
        """Run one task in a child process."""
        self._backoff.restart()
        self._children[Fork(partial(self._run, spec))] = spec
        return run_superexec.LaunchResult.accepted()

    def _run(self, spec: Any) -> None:
        self._children = {}  # of the parent; its exit handler would end them
        try:
            self._become(spec)
        except Exception as error:  # before Flower's own error handling, which ends the process
            _report_failure(spec, f"{type(error).__name__}: {error}")
            raise

    def reconcile(self) -> None:
        """Collect finished children, and report killed ones to Flower immediately instead of after
        a minute."""
        for child, spec in list(self._children.items()):
            code = child.poll()
            if code is not None:
                del self._children[child]
                if code < 0:
                    _report_failure(spec, f"ended by signal {-code}")

    def close(self) -> None:
        """End the child processes."""
        for child in self._children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)


def _report_failure(spec: Any, reason: str) -> None:
    """Report the failure of a task for its process; if the report is lost, Flower detects the
    failure later.

    Args:
        spec: Flower's description of the task.
        reason: why it failed.
    """
    client = run_clientapp.RuntimeHttpClient.from_server_address(
        server_address=spec.runtime_api_address,
        insecure=spec.insecure,
        root_certificates=_read(spec.root_certificates_path),
        interceptors=[
            run_clientapp.RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            run_clientapp.RuntimeTokenHttpInterceptor(spec.token),
        ],
    )
    with client:
        run_clientapp.push_task_output(client, None, "failed", reason)  # logs what it cannot push


def _read(file: str | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()


class TolerantClient(run_superexec.RuntimeHttpClient):
    """An executor's client, which retries calls that fail on the server. Flower's executor exits
    instead, for example if the database is busy, and its ServerApp and the run end."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._owner = os.getpid()

    def AcquireTask(self, request: Any) -> Any:
        """Acquire a task, if there is one."""
        while True:
            try:
                return super().AcquireTask(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500:
                    raise
            time.sleep(AGAIN)

    def close(self) -> None:
        """Close the connection, except in a fork, which does not own it."""
        if os.getpid() == self._owner:
            super().close()


# Heartbeat intervals: lost nodes are detected sooner, and a busy ServerApp does not count as lost.
#
# Missing in Flower: settings for them. A node sends a heartbeat every 30 s and is lost after two; a
# ServerApp is lost after 60 s without one.

HEARTBEAT = 15.0
"""Seconds between a node's heartbeats (Flower's default is 30, its minimum 10); a node is lost
after two. With shorter intervals a killed node is replaced earlier; with longer ones the SuperLink
may be offline for longer before it regards nodes as lost."""
TASK_SILENCE = 150.0
"""Half of the seconds without a heartbeat after which the SuperLink regards a ServerApp as lost
(Flower: 30); long enough for a machine to be suspended for some minutes. The executor reports a
ServerApp that ended immediately."""


class NodeHeartbeats:
    """State of a SuperLink whose nodes count as lost after two intervals `HEARTBEAT`."""

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Activate a node with a heartbeat interval of at most `HEARTBEAT`."""
        return super().activate_node(node_id, min(heartbeat_interval, HEARTBEAT))  # type: ignore[misc]

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        """Acknowledge a heartbeat with an interval of at most `HEARTBEAT`."""
        return super().acknowledge_node_heartbeat(  # type: ignore[misc]
            node_id, min(heartbeat_interval, HEARTBEAT)
        )


def use_in_supernode() -> None:
    """Send a node's heartbeats every `HEARTBEAT` seconds."""
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT  # type: ignore[attr-defined]


def use_in_superlink() -> None:
    """Let tasks count as lost after two intervals `TASK_SILENCE`."""
    from flwr.supercore.corestate import sql_corestate

    sql_corestate.HEARTBEAT_DEFAULT_INTERVAL = TASK_SILENCE  # type: ignore[attr-defined]


# A node that runs its installed code.
#
# Missing in Flower: a SuperNode that does not run, or even install, the code that the server sends.

LoadApp = Callable[[str, str, str], ClientApp]


def use_own_code(load_app: LoadApp) -> None:
    """Let this process handle messages with its own app.

    Args:
        load_app: loads an app, given the name, version and hash of the server's app.
    """
    run_clientapp.get_load_client_app_fn = lambda **_: load_app
    run_clientapp.install_from_fab = lambda *_, **__: None


# A SuperNode that replies to every message exactly once, never with a late reply to another one.
#
# Missing in Flower: a reply for a process that was killed together with its executor. The SuperNode
# works on one message at a time, and waits for any reply without end: the node would stay online
# and never take a message again. If a run is stopped while a message arrives, Flower's loop forgets
# the message but its state does not: the late reply would be sent as the reply to the next message.

_FINISHED = "finished"
_COMPLETED = "completed"  # Flower's status and sub-status of a finished task
_CRASHED = Error(8, "ClientApp stopped responding.")  # as Flower's for a lost process


class AnsweringState(nodestate_factory.InMemoryNodeState):  # type: ignore[misc]
    """State of a SuperNode that replies to every message exactly once.

    Args:
        object_store: Flower's object store.
    """

    _newest_task: int | None = None

    def __init__(self, object_store: Any) -> None:
        super().__init__(object_store)
        self._forgotten: deque[str] = deque(maxlen=1000)

    def store_message(self, message: Message) -> str | None:
        """Store a message as Flower does; a new message ends earlier ones."""
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
        """Get replies as Flower does, without those to ended messages."""
        return [
            message
            for message in super().get_messages_legacy(**asked)
            if message.metadata.reply_to_message_id not in self._forgotten
        ]

    def create_task(self, *args: Any, **kwargs: Any) -> int | None:
        """Create a task as Flower does, and remove finished ones, as there is one message at a
        time."""
        with self.lock_task_store:
            for task in list(self.task_store.values()):
                if task.status.status == _FINISHED:
                    del self.task_store[task.task_id]
        created = super().create_task(*args, **kwargs)
        self._newest_task = created if created is not None else self._newest_task
        return created

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """Finish a task as Flower does; a task that failed late does not reply to the next
        message."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status != _COMPLETED and task_id == self._newest_task:
            runs = {task.run_id for task in self.get_tasks(task_ids=[task_id])}
            self._store_error_replies(runs, _CRASHED)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """Store error replies as Flower does, also to messages that were not fetched yet."""
        with self.lock_msg_store:
            for entry in self.msg_store.values():
                if (
                    entry.message.metadata.run_id in run_ids
                    and not entry.message.metadata.reply_to_message_id
                ):
                    entry.is_retrieved = True
            super()._store_error_replies(run_ids, error)


# The pieces of a message, many in one call.
# Missing in Flower: calls for several pieces, and shorter waits for a missing one. It sends a
# message as a tree of pieces, each named by the SHA-256 of its content, and pushes and pulls each
# piece in a separate call. A training message of a small model has six pieces and passes four pairs
# of processes: most of a round with many nodes was spent on these calls. Here one call names
# several pieces, separated by commas, and its content is `packed`. A call for a single piece is as
# in Flower. Every piece passes the checks of Flower's own state.

FIRST_PULL_WAIT = 0.05
LONGEST_PULL_WAIT = 1.0
"""Seconds before missing pieces of an announced message are requested again (Flower: 1 and 10)."""
LONGEST_WAIT = 7200.0
"""Timeout for an announced piece in seconds (as in Flower)."""
MOST_PIECES = 256
MOST_BYTES = 8 * 2**20
"""Bytes of a call; the last piece may exceed them by at most 5 MiB, Flower's piece size."""
_BETWEEN = ","
_HEAD = struct.Struct(">II")  # index among the requested pieces, bytes

Pull = Callable[[str], bytes]
Push = Callable[[str, bytes], None]


def packed(pieces: Mapping[int, bytes]) -> bytes:
    """Pack the contents of pieces by index into one."""
    return b"".join(_HEAD.pack(index, len(piece)) + piece for index, piece in pieces.items())


def unpacked(content: bytes) -> dict[int, bytes]:
    """Unpack pieces, the inverse of `packed`.

    Raises:
        ValueError: the content is malformed.
    """
    pieces: dict[int, bytes] = {}
    start = 0
    while start < len(content):
        try:
            index, size = _HEAD.unpack_from(content, start)
        except struct.error as error:
            raise ValueError("truncated head of a piece") from error
        start += _HEAD.size
        pieces[index] = content[start : start + size]
        if len(pieces[index]) != size:
            raise ValueError("truncated piece")
        start += size
    return pieces


def pull(
    object_ids: Iterable[str],
    pull_object_fn: Pull,
    *,
    max_time: float = LONGEST_WAIT,
    sleep: Callable[[float], None] = time.sleep,
    **_: Any,
) -> dict[str, bytes]:
    """Pull pieces; replaces Flower's `pull_objects`.

    Args:
        object_ids: names of the pieces.
        pull_object_fn: makes one call.
        max_time: timeout for announced pieces in seconds.
        sleep: waits for a number of seconds.

    Raises:
        ObjectPullError: a piece is unknown, unreadable, or did not arrive before the timeout.
    """
    missing = list(dict.fromkeys(object_ids))
    pieces: dict[str, bytes] = {}
    until = time.monotonic() + max_time
    pauses = Backoff(FIRST_PULL_WAIT, LONGEST_PULL_WAIT, growth=2.0)
    while missing:
        try:
            pieces |= _pulled(missing[:MOST_PIECES], pull_object_fn)
            pauses.restart()
        except ObjectUnavailableError:
            if time.monotonic() >= until:
                raise ObjectPullError(missing[0], "it did not arrive before the timeout") from None
            sleep(pauses.next())
        missing = [name for name in missing if name not in pieces]
    return pieces


def _pulled(names: list[str], pull_object_fn: Pull) -> dict[str, bytes]:
    """Make one call and return the available pieces that fit into a reply, at least one."""
    content = pull_object_fn(_BETWEEN.join(names))
    if len(names) == 1:
        return {names[0]: content}
    try:
        return {names[index]: piece for index, piece in unpacked(content).items()}
    except (ValueError, IndexError) as error:
        raise ObjectPullError(names[0], f"the reply is malformed: {error}") from error


def push(object_contents: Iterable[tuple[str, bytes]], push_object_fn: Push, **_: Any) -> None:
    """Push pieces; replaces Flower's `push_object_contents_from_iterable`.

    Args:
        object_contents: names and contents of the pieces.
        push_object_fn: makes one call.
    """
    batch: dict[str, bytes] = {}
    for name, piece in object_contents:
        size = sum(map(len, batch.values())) + len(piece)
        if batch and (len(batch) == MOST_PIECES or size > MOST_BYTES):
            _push(batch, push_object_fn)
            batch = {}
        batch[name] = piece
    if batch:
        _push(batch, push_object_fn)


def _push(pieces: dict[str, bytes], push_object_fn: Push) -> None:
    if len(pieces) == 1:
        push_object_fn(*next(iter(pieces.items())))
    else:
        push_object_fn(_BETWEEN.join(pieces), packed(dict(enumerate(pieces.values()))))


def use_packed_pieces(*modules: Any, longest_wait: float = LONGEST_WAIT) -> None:
    """Replace `pull_objects` and its push counterpart in Flower's module and in modules that
    imported them.

    Args:
        modules: modules that imported them.
        longest_wait: timeout for an announced piece in seconds.
    """
    patched: tuple[Any, ...] = (inflatable_utils, *modules)
    for module in patched:
        module.pull_objects = partial(pull, max_time=longest_wait)
        module.push_object_contents_from_iterable = push


class PackedPieces:
    """State of a SuperLink or SuperNode whose calls may name several pieces."""

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        """Get a piece as Flower does: None if unknown, empty if not yet available. For several
        pieces, return the available ones, at least one, up to the size of a call."""
        names = object_id.split(_BETWEEN)
        if len(names) == 1:
            return super().get_object(run_id, object_id)  # type: ignore[misc]
        pieces: dict[int, bytes] = {}
        with self._transaction():
            for index, name in enumerate(names[:MOST_PIECES]):
                piece = super().get_object(run_id, name)  # type: ignore[misc]
                if piece is None:
                    return None
                if piece:
                    pieces[index] = piece
                if sum(map(len, pieces.values())) >= MOST_BYTES:
                    break
        return packed(pieces)

    def store_object(
        self, run_id: int, session_id: str, object_id: str, object_content: bytes
    ) -> bool:
        """Store pieces; return True if all were stored."""
        names = object_id.split(_BETWEEN)
        store = super().store_object  # type: ignore[misc]
        if len(names) == 1:
            return store(run_id, session_id, object_id, object_content)
        try:
            pieces = unpacked(object_content)
        except ValueError:
            return False
        if list(pieces) != list(range(len(names))):
            return False
        with self._transaction():
            return all(
                store(run_id, session_id, name, piece)
                for name, piece in zip(names, pieces.values(), strict=True)
            )

    def _transaction(self) -> AbstractContextManager[Any]:
        """Open one transaction for all pieces, if the state is in a database."""
        return self.session() if hasattr(self, "session") else nullcontext()  # type: ignore[attr-defined]


# Polls of nodes without a message, held in memory until there is one.
#
# Missing in Flower: polls that the SuperLink holds until there is a message (long polling). Most
# calls to a SuperLink with many nodes are of this kind. In Flower each passes nine middlewares and
# two threads, and writes to the database to mark messages as delivered, although there are none:
# about 10 ms of the one core that a SuperLink can use, so that a round with 40 nodes takes twice as
# long. Here the same authentication comes first; then the call is answered from an in-memory table
# of nodes without messages, and every other call is handled by Flower.
#
# The reply is held until a message is stored for the node, for at most `HELD` seconds, so that an
# idle node polls twice a minute and still learns of a message at once. The reply is always empty:
# the node polls again, with a new signature, and that call returns the message, so none is lost if
# a held call has been abandoned.

POLL_PATH = "/v1/fleet/pull-messages"
"""Path of the call with which a node polls for a message."""
PROTOBUF = "application/protobuf"
BELIEVED = 60.0
"""Seconds after which the database is queried again for a node's messages."""
HELD = 25.0
"""Largest number of seconds for which a poll is held; the call would fail after 30."""


class EmptyQueues:
    """Nodes known to have no message in the database.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._until: dict[int, float] = {}
        self._stored: Counter[int] = Counter()
        self._held: dict[int, Callable[[], Any]] = {}  # ends the held call of a node
        self._closed = False

    def __contains__(self, node: int) -> bool:
        return self._until.get(node, 0.0) > self._clock()

    def stored(self, node: int) -> None:
        """Record that a message for a node was stored in the database."""
        with self._lock:
            self._stored[node] += 1
            self._until.pop(node, None)
            end = self._held.pop(node, None)
        if end is not None:
            end()

    def messages(self, node: int) -> int:
        """Number of messages stored for a node so far; read it before querying the database."""
        return self._stored[node]

    def none_found(self, node: int, messages: int) -> None:
        """Record that the database has no message for a node; ignored if one was stored since
        `messages` was read, because the query may have missed it."""
        with self._lock:
            if self._stored[node] == messages:
                self._until[node] = self._clock() + BELIEVED

    async def wait(self, node: int, seconds: float) -> None:
        """Wait for a message to a node, or until the timeout; only a node's last call is held."""
        ended = asyncio.Event()
        # may be called from any thread
        end = partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set)
        with self._lock:
            if self._closed or node not in self:
                return
            earlier = self._held.pop(node, None)
            self._held[node] = end
        if earlier is not None:
            earlier()
        try:
            await asyncio.wait_for(ended.wait(), seconds)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                if self._held.get(node) is end:
                    del self._held[node]

    def close(self) -> None:
        """Answer all held calls, and hold no more."""
        with self._lock:
            self._closed = True
            calls = list(self._held.values())
            self._held = {}
        for end in calls:
            end()


class IdleNodes(linkstate_factory.SqlLinkState):  # type: ignore[misc]
    """State of a SuperLink that caches in memory which nodes have no message."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.empty_queues = EmptyQueues()
        self.nodes: dict[bytes, int] = {}  # ids by public key, cached
        self._looking_up = Lock()

    def store_message_ins(self, message: flwr.app.Message) -> str | None:
        """Store a message as Flower does, and answer the held call of its node."""
        try:
            return super().store_message_ins(message)
        finally:
            self.empty_queues.stored(message.metadata.dst_node_id)

    def store_message_and_object_tree(
        self, message: flwr.app.Message, *rest: Any
    ) -> tuple[bool, list[str]]:
        """Store a message as Flower does; it is visible only after this outer transaction."""
        try:
            return super().store_message_and_object_tree(message, *rest)
        finally:
            self.empty_queues.stored(message.metadata.dst_node_id)

    def get_message_ins(
        self, node_id: int, limit: int | None, *, run_id: int | None = None
    ) -> list[flwr.app.Message]:
        """Get a message as Flower does, and record if there was none."""
        stored = self.empty_queues.messages(node_id)
        messages = super().get_message_ins(node_id, limit, run_id=run_id)
        if not messages and run_id is None:
            self.empty_queues.none_found(node_id, stored)
        return messages

    def get_node_id_by_public_key(self, public_key: bytes) -> int | None:
        """Node id of a public key, cached until a node is removed."""
        node = self.nodes.get(public_key)
        if node is not None:
            return node
        with self._looking_up:
            node = super().get_node_id_by_public_key(public_key)
            if node is not None:
                self.nodes[public_key] = node
        return node

    def delete_node(self, owner_aid: str, node_id: int) -> None:
        """Delete a node as Flower does, and clear the cached ids."""
        with self._looking_up:
            try:
                super().delete_node(owner_aid, node_id)
            finally:
                self.nodes.clear()


class AnswerIdleNodes:
    """ASGI middleware that answers polls of nodes without a message and passes on all other calls.

    Args:
        app: the wrapped application.
        state: the SuperLink's state.
        held: largest number of seconds for which a poll is held.
    """

    def __init__(self, app: ASGIApp, state: IdleNodes, held: float = HELD) -> None:
        self._app = app
        self._state = state
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        node = None
        if scope["type"] == "http" and scope["path"] == POLL_PATH and scope["method"] == "POST":
            node = self._without_messages(Headers(scope=scope))
        if node is None:
            await self._app(scope, receive, send)
            return
        await Request(scope, receive).body()
        await self._state.empty_queues.wait(node, self._held)
        await Response(b"", media_type=PROTOBUF)(scope, receive, send)  # no messages

    def _without_messages(self, headers: Headers) -> int | None:
        """Id of the authenticated polling node if it has no messages, else None. Flower handles
        invalid calls."""
        signature = NodeSignature.of(headers)
        if signature is None or headers.get("content-type") != PROTOBUF:
            return None
        node = self._state.nodes.get(signature.key)
        if node is None or node not in self._state.empty_queues or signature.fault():
            return None
        return node


def _state_of(config: uvicorn.Config) -> IdleNodes:
    return config.app.state.linkstate_factory.state()  # type: ignore[union-attr]


def answer_idle_nodes() -> None:
    """Add `AnswerIdleNodes` to the web servers of this process."""
    load = uvicorn.Config.load

    def loaded(config: uvicorn.Config) -> None:
        load(config)
        config.loaded_app = AnswerIdleNodes(config.loaded_app, _state_of(config))  # type: ignore[arg-type]

    uvicorn.Config.load = loaded  # type: ignore[method-assign]
    uvicorn.Server.main_loop = until_it_ends  # type: ignore[method-assign]


async def until_it_ends(self: uvicorn.Server) -> None:
    """Run as uvicorn's `Server.main_loop`; at the end, answer held calls, for which the server
    would wait."""
    await ticking(self)
    _state_of(self.config).empty_queues.close()
