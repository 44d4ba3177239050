# SPDX-License-Identifier: Apache-2.0
"""Polls of nodes without a message, held in memory until there is one.

Missing in Flower: polls that the SuperLink holds until there is a message (long polling). Most
calls to a SuperLink with many nodes are of this kind. In Flower each passes nine middlewares and
two threads, and writes to the database to mark messages as delivered, although there are none:
about 10 ms of the one core that a SuperLink can use, so that a round with 40 nodes takes twice as
long. Here the same authentication comes first; then the call is answered from an in-memory table of
nodes without messages, and every other call is handled by Flower.

The reply is held until a message is stored for the node, for at most `HELD` seconds, so that an
idle node polls twice a minute and still learns of a message at once. The reply is always empty:
the node polls again, with a new signature, and that call returns the message, so none is lost if
a held call has been abandoned.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import flwr.app
import uvicorn
from flwr.server.superlink.linkstate import linkstate_factory
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from simulations.deployment.flower_patches import ticking
from simulations.deployment.pki import NodeSignature

PULL = "/v1/fleet/pull-messages"
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
        if scope["type"] == "http" and scope["path"] == PULL and scope["method"] == "POST":
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
