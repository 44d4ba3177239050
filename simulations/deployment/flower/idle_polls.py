# SPDX-License-Identifier: Apache-2.0
"""Fast replies to nodes that poll while they have no message, without using the database.

Most calls to a SuperLink with many nodes are of this kind. In Flower each passes nine middlewares
and two threads, and writes to the database to mark messages as delivered, although there are none:
some 10 ms of the one core that a SuperLink can use. Here the same authentication comes first; then
the call is answered from an in-memory table of nodes without messages, and every other call is
handled by Flower.

The reply is held until a message is stored for the node, for at most `HELD` seconds (long polling),
so that an idle node polls twice a minute and still learns of a message at once. The reply is always
empty: the node polls again, with a new signature, and that call returns the message, so none is
lost if a held call has been abandoned.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from fastapi import HTTPException
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.dependencies.linkstate import get_linkstate
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from google.protobuf.message import DecodeError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PULL = "/v1/fleet/pull-messages"
"""Path of the call with which a node polls for a message."""
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


class AnswerIdleNodes:
    """ASGI middleware that answers polls of nodes without a message and passes on all other calls.

    Args:
        app: what it passes on to; its link state has `empty_queues`, an `EmptyQueues`.
        held: most seconds until a node without messages is answered.
    """

    def __init__(self, app: ASGIApp, held: float = HELD) -> None:
        self._app = app
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PULL:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        body = await request.body()
        node = _without_messages(request, body)
        if node is not None:
            await _queues(request).wait(node, self._held)
            nothing = PullMessagesResponse().SerializeToString()
            await Response(nothing, media_type=PROTOBUF_MEDIA_TYPE)(scope, receive, send)
        else:
            await self._app(scope, _again(body, receive), send)


def _queues(request: Request) -> EmptyQueues:
    return get_linkstate(request).empty_queues  # type: ignore[attr-defined]


def _without_messages(request: Request, body: bytes) -> int | None:
    """The authenticated node that polls, if no message waits for it. Invalid calls are left to
    Flower."""
    if request.method != "POST" or request.headers.get("content-type") != PROTOBUF_MEDIA_TYPE:
        return None
    try:
        asked = PullMessagesRequest.FromString(body)
        if asked.node.node_id not in _queues(request):
            return None
        request.state.protobuf_request = asked
        authenticate_node(request)
    except (DecodeError, HTTPException):
        return None
    return asked.node.node_id


def _again(body: bytes, receive: Receive) -> Receive:
    """The request's body as one piece, then whatever follows."""
    pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return pieces.pop() if pieces else await receive()

    return read
