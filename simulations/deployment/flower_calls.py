# SPDX-License-Identifier: Apache-2.0
"""Patches of Flower's calls between processes: many pieces in one call, polls that are held until
there is a message, and direct middlewares.

Without them, a round with 20 nodes takes more than twice as long.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import Any

import flwr.app
import uvicorn
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from starlette.datastructures import Headers
from starlette.middleware.base import BaseHTTPMiddleware, _CachedRequest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedrec.runtime.process import Backoff
from simulations.deployment.flower_patches import ticking
from simulations.deployment.pki import NodeSignature

# The pieces of a message, many in one call.
#
# Missing in Flower: calls for more than one piece, and shorter waits for a missing one. It sends a
# message as a tree of pieces, each named by the SHA-256 of its content, and pushes and pulls each
# in a call of its own. A training message of a small model has six, and passes four pairs of
# processes: most of a round with many nodes was spent on calls for pieces. Here one call names
# several pieces, separated by commas, and its content is `packed`. A call for a single piece is as
# in Flower. Every piece passes the checks of Flower's own state.

FIRST_PULL_WAIT = 0.05
LONGEST_PULL_WAIT = 1.0
"""Seconds before missing pieces of an announced message are requested again (Flower: 1 and 10)."""
LONGEST_WAIT = 7200.0
"""Seconds until an announced piece is given up (as in Flower)."""
MOST_PIECES = 256
MOST_BYTES = 8 * 2**20
"""Bytes of a call; the last piece may exceed them, by at most 5 MiB, the size at which Flower
cuts."""
_BETWEEN = ","
_HEAD = struct.Struct(">II")  # index among the pieces that were asked for, bytes

Pull = Callable[[str], bytes]
Push = Callable[[str, bytes], None]


def packed(pieces: Mapping[int, bytes]) -> bytes:
    """Contents of pieces by their indices, as one."""
    return b"".join(_HEAD.pack(index, len(piece)) + piece for index, piece in pieces.items())


def unpacked(content: bytes) -> dict[int, bytes]:
    """The inverse of `packed`.

    Raises:
        ValueError: these are not packed pieces.
    """
    pieces: dict[int, bytes] = {}
    start = 0
    while start < len(content):
        try:
            index, size = _HEAD.unpack_from(content, start)
        except struct.error as error:
            raise ValueError("cut in the head of a piece") from error
        start += _HEAD.size
        pieces[index] = content[start : start + size]
        if len(pieces[index]) != size:
            raise ValueError("cut in a piece")
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
    """Replaces Flower's `pull_objects`.

    Args:
        object_ids: names of the pieces.
        pull_object_fn: a call.
        max_time: seconds until pieces that were announced are given up.
        sleep: waits.

    Raises:
        ObjectPullError: a piece is unknown, was not there in time, or cannot be read.
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
                raise ObjectPullError(missing[0], "it was not there in time") from None
            sleep(pauses.next())
        missing = [name for name in missing if name not in pieces]
    return pieces


def _pulled(names: list[str], pull_object_fn: Pull) -> dict[str, bytes]:
    """One call: the available pieces that fit into a reply, at least one."""
    content = pull_object_fn(_BETWEEN.join(names))
    if len(names) == 1:
        return {names[0]: content}
    try:
        return {names[index]: piece for index, piece in unpacked(content).items()}
    except (ValueError, IndexError) as error:
        raise ObjectPullError(names[0], f"the answer cannot be read: {error}") from error


def push(object_contents: Iterable[tuple[str, bytes]], push_object_fn: Push, **_: Any) -> None:
    """Replaces Flower's `push_object_contents_from_iterable`.

    Args:
        object_contents: names and contents of the pieces.
        push_object_fn: a call.
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
    """Replace these functions in this process, in Flower's module and in those that have imported
    them.

    Args:
        modules: that have imported them.
        longest_wait: seconds until an announced piece is given up.
    """
    patched: tuple[Any, ...] = (inflatable_utils, *modules)
    for module in patched:
        module.pull_objects = partial(pull, max_time=longest_wait)
        module.push_object_contents_from_iterable = push


class PackedPieces:
    """The state of a SuperLink or SuperNode, whose calls may name several pieces."""

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        """As Flower's: None for an unknown piece, empty if it is not there yet. Of several pieces,
        those that are there, at least one, up to the size of a call."""
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
        """As Flower's; whether all pieces were stored."""
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
        """One for all pieces, where the state is in a database."""
        return self.session() if hasattr(self, "session") else nullcontext()  # type: ignore[attr-defined]


# Polls of nodes without a message, held in memory until there is one.
#
# Missing in Flower: polls that the SuperLink holds until there is a message (long polling). Most
# calls to a SuperLink with many nodes are of this kind. In Flower each passes nine middlewares and
# two threads, and writes to the database to mark messages as delivered, although there are none:
# some 10 ms of the one core that a SuperLink can use. Here the same authentication comes first;
# then the call is answered from an in-memory table of nodes without messages, and every other call
# is handled by Flower.
#
# The reply is held until a message is stored for the node, for at most `HELD` seconds, so that an
# idle node polls twice a minute and still learns of a message at once. The reply is always empty:
# the node polls again, with a new signature, and that call returns the message, so none is lost if
# a held call has been abandoned.

PULL = "/v1/fleet/pull-messages"
"""Path of the call with which a node polls for a message."""
PROTOBUF = "application/protobuf"
BELIEVED = 60.0
"""Seconds after which the database is asked again whether there is a message for a node."""
HELD = 25.0
"""Largest number of seconds until a node without messages is answered; its call would fail after
30."""


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
        self._held: dict[int, Callable[[], Any]] = {}  # ends the held call of a node
        self._closed = False

    def __contains__(self, node: int) -> bool:
        return self._until.get(node, 0.0) > self._clock()

    def stored(self, node: int) -> None:
        """A message for a node was written to the database."""
        with self._lock:
            self._stored[node] += 1
            self._until.pop(node, None)
            end = self._held.pop(node, None)
        if end is not None:
            end()

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
        """Answer all held calls, and hold none from now on."""
        with self._lock:
            self._closed = True
            calls = list(self._held.values())
            self._held = {}
        for end in calls:
            end()


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
        messages = super().get_message_ins(node_id, limit, run_id=run_id)
        if not messages and run_id is None:
            self.empty_queues.none_found(node_id, stored)
        return messages

    def get_node_id_by_public_key(self, public_key: bytes) -> int | None:
        """As Flower's; cached until a node is removed."""
        node = self.nodes.get(public_key)
        if node is not None:
            return node
        with self._looking_up:
            node = super().get_node_id_by_public_key(public_key)
            if node is not None:
                self.nodes[public_key] = node
        return node

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


def _state_of(config: uvicorn.Config) -> IdleNodes:
    return config.app.state.linkstate_factory.state()  # type: ignore[union-attr]


def answer_idle_nodes() -> None:
    """Let web servers of this process answer idle nodes first."""
    load = uvicorn.Config.load

    def loaded(config: uvicorn.Config) -> None:
        load(config)
        config.loaded_app = AnswerIdleNodes(config.loaded_app, _state_of(config))  # type: ignore[arg-type]

    uvicorn.Config.load = loaded  # type: ignore[method-assign]
    uvicorn.Server.main_loop = until_it_ends  # type: ignore[method-assign]


async def until_it_ends(self: uvicorn.Server) -> None:
    """Replaces uvicorn's `Server.main_loop`; at the end, held calls are answered, because the
    server would wait for them."""
    await ticking(self)
    _state_of(self.config).empty_queues.close()


# Starlette's middlewares without a task and a stream for each, for calls with a single response.
#
# Missing in Flower: middlewares of one layer, or none for calls that they do not concern. A call to
# a SuperLink passes nine middlewares on Starlette's base class. Each runs the next one in a task
# and passes the response through a stream, and each piece of the request through another task, so
# that endless responses can be cancelled: two thirds of the time of a small call. Calls of nodes
# and executors have one request and one response, and are passed on directly here.

UNARY = ("/v1/fleet/", "/v1/runtime/")
"""Paths of calls with one answer."""
_usual = BaseHTTPMiddleware.__call__


def use_direct_middleware() -> None:
    """Replace the call of all such middlewares in this process."""
    BaseHTTPMiddleware.__call__ = directly


async def directly(self: BaseHTTPMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
    """Replaces `BaseHTTPMiddleware.__call__`."""
    if scope["type"] != "http" or not scope["path"].startswith(UNARY):
        await _usual(self, scope, receive, send)
        return
    request = _CachedRequest(scope, receive)

    async def call_next(_: Request) -> Response:
        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        await self.app(scope, request.wrapped_receive, collect)
        if not messages or messages[0]["type"] != "http.response.start":
            raise RuntimeError("No response returned.")
        answer = Response(status_code=messages[0]["status"])
        answer.body = b"".join(message.get("body", b"") for message in messages[1:])
        answer.raw_headers = list(messages[0]["headers"])
        return answer

    answer = await self.dispatch_func(request, call_next)
    await answer(scope, receive, send)
