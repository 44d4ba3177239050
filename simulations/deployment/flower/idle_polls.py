# SPDX-License-Identifier: Apache-2.0
"""Fast replies to nodes that poll while they have no message, without using the database.

Most calls to a SuperLink with many nodes are of this kind. In Flower each passes nine middlewares
and two threads, and marks a message as delivered in a write to the database that finds none: some
10 ms of the one core that a SuperLink can use. Here the same authentication comes first; then the
call is answered from a cache of nodes without messages, or passed on to Flower.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from threading import Lock

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
BELIEVED = 15.0
"""Seconds after which the database is asked again whether there is a message for a node."""


class EmptyQueues:
    """Nodes without a message in the database, until one is stored for them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._until: dict[int, float] = {}
        self._stored: Counter[int] = Counter()

    def __contains__(self, node: int) -> bool:
        return self._until.get(node, 0.0) > self._clock()

    def stored(self, node: int) -> None:
        """A message for a node was written to the database."""
        with self._lock:
            self._stored[node] += 1
            self._until.pop(node, None)

    def messages(self, node: int) -> int:
        """Number of messages stored for a node so far; read before the database is queried."""
        return self._stored[node]

    def none_found(self, node: int, messages: int) -> None:
        """Record that the database has no message for a node; ignored if one was stored since
        `messages` was read, because the query may have missed it."""
        with self._lock:
            if self._stored[node] == messages:
                self._until[node] = self._clock() + BELIEVED


class AnswerIdleNodes:
    """ASGI middleware that answers polls of nodes without a message and passes on all other calls.

    Args:
        app: what it passes on to; its link state has `empty_queues`, an `EmptyQueues`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PULL:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        body = await request.body()
        if _has_nothing(request, body):
            nothing = PullMessagesResponse().SerializeToString()
            await Response(nothing, media_type=PROTOBUF_MEDIA_TYPE)(scope, receive, send)
        else:
            await self._app(scope, _again(body, receive), send)


def _has_nothing(request: Request, body: bytes) -> bool:
    """Whether an authenticated node polls and has no message. Flower answers invalid calls."""
    try:
        asked = PullMessagesRequest.FromString(body)
        if asked.node.node_id not in get_linkstate(request).empty_queues:  # type: ignore[attr-defined]
            return False
        request.state.protobuf_request = asked
        authenticate_node(request)
    except (DecodeError, HTTPException):
        return False
    return request.method == "POST" and request.headers.get("content-type") == PROTOBUF_MEDIA_TYPE


def _again(body: bytes, receive: Receive) -> Receive:
    """The request's body as one piece, then whatever follows."""
    pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return pieces.pop() if pieces else await receive()

    return read
