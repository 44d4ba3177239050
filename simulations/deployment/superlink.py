# SPDX-License-Identifier: Apache-2.0
"""Flower's SuperLink with our patches (held polls of idle nodes, a longer wait for its database),
and the operator's calls to it."""

import asyncio
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, Self, get_type_hints

import flwr.app
import uvicorn
from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.corestate import sql_corestate
from sqlalchemy import event
from sqlalchemy.pool import Pool
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fedrec.errors import EngineError
from simulations import flower_commands
from simulations.deployment.gateway import NodeSignature, as_sent
from simulations.deployment.layout import Deployment
from simulations.deployment.processes import check_container_user
from simulations.deployment.supernode import HEARTBEAT, PackedPieces, server_executor
from simulations.flower_commands import disable_telemetry

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


class _EmptyQueues:
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


class _SuperLinkState(PackedPieces, linkstate_factory.SqlLinkState):  # type: ignore[misc]
    """State of a SuperLink that caches in memory which nodes have no message, and whose nodes count
    as lost after two intervals `HEARTBEAT`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.empty_queues = _EmptyQueues()

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Activate a node with a heartbeat interval of at most `HEARTBEAT`."""
        return super().activate_node(node_id, min(heartbeat_interval, HEARTBEAT))

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        """Acknowledge a heartbeat with an interval of at most `HEARTBEAT`."""
        return super().acknowledge_node_heartbeat(node_id, min(heartbeat_interval, HEARTBEAT))

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


class _AnswerIdleNodes:
    """ASGI middleware that answers polls of nodes without a message and passes on all other calls.

    Args:
        app: the wrapped application.
        state: the SuperLink's state.
        held: largest number of seconds for which a poll is held.
    """

    def __init__(self, app: ASGIApp, state: _SuperLinkState, held: float = HELD) -> None:
        self._app = app
        self._state = state
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        node = None
        if scope["type"] == "http" and scope["path"] == POLL_PATH and scope["method"] == "POST":
            node = await run_in_threadpool(self._without_messages, Headers(scope=scope))
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
        node = self._state.get_node_id_by_public_key(signature.key)
        if node is None or node not in self._state.empty_queues or signature.fault():
            return None
        return node


def _state_of(config: uvicorn.Config) -> _SuperLinkState:
    return config.app.state.linkstate_factory.state()  # type: ignore[union-attr]


def _answer_idle_nodes() -> None:
    """Add `_AnswerIdleNodes` to the web servers of this process."""
    load = uvicorn.Config.load

    def _loaded(config: uvicorn.Config) -> None:
        load(config)
        config.loaded_app = _AnswerIdleNodes(config.loaded_app, _state_of(config))  # type: ignore[arg-type]

    uvicorn.Config.load = _loaded  # type: ignore[method-assign]
    uvicorn.Server.main_loop = _until_it_ends  # type: ignore[method-assign]


_MAIN_LOOP = uvicorn.Server.main_loop


async def _until_it_ends(self: uvicorn.Server) -> None:
    """Run as uvicorn's `Server.main_loop`; at the end, answer held calls, for which the server
    would wait."""
    await _MAIN_LOOP(self)
    _state_of(self.config).empty_queues.close()


TASK_SILENCE = 150.0
"""Half of the seconds without a heartbeat after which the SuperLink regards a ServerApp as lost
(Flower: 30); long enough for a machine to be suspended for some minutes. The executor reports a
ServerApp that ended immediately."""
DATABASE_WAIT_MS = 60_000
"""Milliseconds that the SuperLink waits for a lock on its database (Flower: 5,000)."""


def _wait_for_database() -> None:
    """Set a longer lock timeout for all database connections of this process: those of the
    SuperLink's state and of its pieces."""
    event.listen(Pool, "checkout", _wait_longer)


def _wait_longer(connection: Any, *_: object) -> None:
    connection.execute(f"PRAGMA busy_timeout = {DATABASE_WAIT_MS}")


def superlink(arguments: list[str]) -> None:
    """Run `flower-superlink` with all patches and the largest allowed number of open files."""
    flower_commands.load("flower-superlink")
    sql_corestate.HEARTBEAT_DEFAULT_INTERVAL = TASK_SILENCE  # type: ignore[attr-defined]
    _answer_idle_nodes()
    _wait_for_database()
    linkstate_factory.SqlLinkState = _SuperLinkState  # type: ignore[misc]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each waiting node
    flower_commands.run("flower-superlink", arguments)


# The operator's calls to a SuperLink: register and list nodes, list and stop runs.
# Missing in Flower: a public Python interface for them. Its command `flwr` starts a Python process
# per call, which takes a second of a core, and `up` makes several calls per node.

_REMOVED = "unregistered"  # status of nodes by Flower


def heard(node: Any, now: float) -> str:
    """Time since the last heartbeat of a node of `Control.nodes`, as text.

    Args:
        node: Flower's record. `online_until` is the deadline of its next heartbeat, after which it
            counts as lost, in seconds since 1970; 0: it never connected.
        now: seconds since 1970.
    """
    if not node.online_until:
        return "never"
    if node.status != "online":
        return f"not after {datetime.fromtimestamp(node.online_until):%Y-%m-%d %H:%M:%S}"
    last = node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval
    return f"{max(0.0, now - last):.0f} s ago"


class RunState(NamedTuple):
    """State of a run in the SuperLink: `status` such as `running` or `finished:failed`, and
    `details` of a failure."""

    run: int
    status: str
    details: str = ""


class Control:
    """The operator's calls to a deployment's SuperLink, as a context manager.

    Args:
        deployment: the deployment.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._client = ControlHttpClient.from_server_address(
            deployment.superlink,
            insecure=False,
            root_certificates=deployment.authority.read_bytes(),
            interceptors=(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def register(self, public_key: bytes, name: str) -> int:
        """Register a node by its public key in OpenSSH's format, unless it is registered, and
        return its id."""
        point = as_sent(public_key)
        for node in self.nodes():
            if node.public_key == point:
                return node.node_id
        return self._call("RegisterNode", public_key=point, name=name).node_id

    def unregister(self, public_key: bytes) -> None:
        """Remove the node with a public key in OpenSSH's format, if there is one; its calls are
        then refused."""
        for node in self.nodes():
            if node.public_key == as_sent(public_key):
                self._call("UnregisterNode", node_id=node.node_id)

    def nodes(self) -> list[Any]:
        """Flower's records of all registered nodes, without the removed ones."""
        return [n for n in self._call("ListNodes").nodes_info if n.status != _REMOVED]

    def names(self) -> dict[str, str]:
        """Names of the registered nodes, such as `node-2`, by Flower's id."""
        return {str(node.node_id): node.name for node in self.nodes() if node.name}

    def runs(self) -> list[RunState]:
        """All runs, newest first."""
        runs = self._call("ListRuns").run_dict.values()
        newest = sorted(runs, key=lambda run: (run.pending_at, run.run_id), reverse=True)
        return [RunState(run.run_id, _status(run.status), run.status.details) for run in newest]

    def log(self, run: int) -> str:
        """ServerApp output of a finished run."""
        return "".join(part.log_output for part in self._call("StreamLogs", run_id=run))

    def stop(self, run: int) -> None:
        """End a run; its run folder can be resumed."""
        self._call("StopRun", run_id=run)

    def _call(self, method: str, /, **fields: Any) -> Any:
        """Call a method of Flower's control client with the fields of its request."""
        call = getattr(self._client, method)
        return call(get_type_hints(call)["request"](**fields))


def _status(status: Any) -> str:
    return f"{status.status}:{status.sub_status}".rstrip(":")


# Main program of the server's processes: `superlink` or `executor`, with the flags of Flower's
# programs.


def main() -> None:
    """Run the part that the first argument names."""
    disable_telemetry(os.environ)
    try:
        check_container_user()
    except EngineError as error:
        sys.exit(f"error: {error.text()}")
    part, *arguments = sys.argv[1:]
    {"superlink": superlink, "executor": server_executor}[part](arguments)


if __name__ == "__main__":
    main()
