# SPDX-License-Identifier: Apache-2.0
"""Flower's programs with our patches: SuperNode, SuperLink, executors, and the operator's calls."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Self, get_type_hints

import httpx
from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.supercore.control import ControlHttpClient
from flwr.supernode.nodestate import nodestate_factory
from sqlalchemy import event
from sqlalchemy.pool import Pool
from uvicorn import Server

from fedrec.runtime.process import Backoff
from simulations import flower_commands
from simulations.deployment import flower_patches
from simulations.deployment.flower_patches import (
    AnsweringState,
    ForkExecutor,
    IdleNodes,
    LoadApp,
    NodeHeartbeats,
    PacedTime,
    PackedPieces,
    answer_idle_nodes,
    ticking,
)
from simulations.deployment.layout import Deployment
from simulations.deployment.pki import as_sent
from simulations.deployment.processes import REFUSED

FLOWER_POLL = 3.0
"""Seconds between two polls of Flower's SuperNode; shorter sleeps are waits for a reply."""
FIRST_POLL = 0.1
"""Seconds after a message until the SuperNode polls for the next one."""
HELD_LONG = 5.0
"""Seconds after which an empty reply counts as held by the SuperLink."""
FIRST_LOOK = 0.03
LONGEST_LOOK = 0.5
"""Seconds between two checks for the reply to a message (Flower: .5)."""


class NodePace:
    """Sleep times of the SuperNode: short after a message, longer while idle or waiting for a
    reply.

    A poll that took long was held by the SuperLink, so the next poll follows at once.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._message = Backoff(FIRST_POLL, FLOWER_POLL, growth=1.3)
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


class SuperNodeState(PackedPieces, AnsweringState):
    """Flower's state of a SuperNode with all patches."""


def freeze() -> None:
    """Exclude all objects so far from garbage collection, which would write to all pages that forks
    share, and took a seventh of a SuperLink's time."""
    gc.collect()
    gc.freeze()


def load() -> Any:
    """Import and patch all parts of Flower's SuperNode, once before forking, and return its main
    loop."""
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    importlib.import_module("flwr.supernode.main")  # otherwise imported by each SuperNode
    flower_commands.load("flower-supernode")
    flower_patches.use_packed_pieces(loop)
    return loop


def supernode(arguments: list[str]) -> None:
    """Run `flower-supernode` with shorter waits, faster heartbeats, and a reply to every message.
    If the server does not accept the node's key, the process exits with the status `REFUSED`.

    Args:
        arguments: arguments of `flower-supernode`.
    """
    load().time = PacedTime(NodePace())
    flower_patches.use_in_supernode()
    Server.main_loop = ticking
    nodestate_factory.InMemoryNodeState = SuperNodeState  # type: ignore[misc]
    ending_as_refused(partial(flower_commands.run, "flower-supernode", arguments))


def ending_as_refused(connect: Callable[[], None]) -> None:
    """Run a SuperNode; exit with the status `REFUSED` if the server rejected it (401, 403 or
    similar), otherwise as Flower does."""
    try:
        connect()
    except BaseException as end:
        error: BaseException | None = end
        while error is not None and not isinstance(error, httpx.HTTPStatusError):
            error = error.__context__
        if error is not None and 400 <= error.response.status_code < 500:
            print(f"the server does not accept this node's key: {error}", file=sys.stderr)
            sys.exit(REFUSED)
        raise


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
        moment = datetime.fromtimestamp(node.online_until)
        return f"not after {moment.strftime('%Y-%m-%d %H:%M:%S')}"
    last = node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval
    return f"{max(0.0, now - last):.0f} s ago"


def overdue(node: Any, now: float) -> bool:
    """Return True if the heartbeat of a node is overdue, at a time in seconds since 1970."""
    return now > node.online_until - (HEARTBEAT_PATIENCE - 1) * node.heartbeat_interval


@dataclass(frozen=True)
class RunState:
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

    def unregister(self, public_key: bytes) -> bool:
        """Remove the node with a public key in OpenSSH's format, whose calls are then refused;
        return False if it is unknown."""
        point = as_sent(public_key)
        ids = [node.node_id for node in self.nodes() if node.public_key == point]
        for node in ids:
            self._call("UnregisterNode", node_id=node)
        return bool(ids)

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


# Flower's executors of the server and of nodes, which run each task in a fork.

PIECES_WAIT = 60.0
"""Seconds that the ServerApp waits for the pieces of an announced reply; with Flower's two hours a
node could block a round by never sending them."""
LONGEST_POLL = 1.0
"""Longest time in seconds between two polls of an idle executor, as in Flower."""
SERVER_APP = "flwr-serverapp"
CLIENT_APP = "flwr-clientapp"
"""Kinds of tasks, named by Flower's commands that run them."""


def server_executor(arguments: list[str]) -> None:
    """Run `flower-superexec`, which forks ServerApps and retries failed calls."""
    flower_patches.use_packed_pieces(longest_wait=PIECES_WAIT)
    _execute(SERVER_APP, arguments)


def client_executor(arguments: list[str], load_app: LoadApp) -> None:
    """Run `flower-superexec`, which forks ClientApps."""
    flower_patches.use_packed_pieces()
    flower_patches.use_own_code(load_app)
    _execute(CLIENT_APP, arguments)


def _execute(kind: str, arguments: list[str]) -> None:
    flower_commands.load(kind)  # once for all forks
    backoff = Backoff(FIRST_POLL, LONGEST_POLL)
    executor = ForkExecutor(kind, partial(_work_on, kind), backoff)
    flower_patches.use_own_loop(executor, backoff)
    flower_commands.run("flower-superexec", arguments)


def _work_on(kind: str, task: Any) -> None:
    """Run Flower's command for one task."""
    arguments = ["--runtime-api-address", task.runtime_api_address, "--token", task.token]
    if task.root_certificates_path is not None:
        arguments += ["--root-certificates", task.root_certificates_path]
    flower_commands.run(kind, [*arguments, "--parent-pid", str(os.getppid())])


DATABASE_WAIT_MS = 60_000
"""Milliseconds that the SuperLink waits for a lock on its database (Flower: 5,000)."""


class SuperLinkState(PackedPieces, NodeHeartbeats, IdleNodes):
    """Flower's state of a SuperLink with all patches."""


def wait_for_database() -> None:
    """Set a longer lock timeout for all database connections of this process: those of the
    SuperLink's state and of its pieces."""
    event.listen(Pool, "checkout", _wait_longer)


def _wait_longer(connection: Any, *_: object) -> None:
    connection.execute(f"PRAGMA busy_timeout = {DATABASE_WAIT_MS}")


def superlink(arguments: list[str]) -> None:
    """Run `flower-superlink` with all patches, the largest allowed number of open files, and less
    garbage collection."""
    flower_commands.load("flower-superlink")
    flower_patches.use_in_superlink()
    answer_idle_nodes()
    wait_for_database()
    linkstate_factory.SqlLinkState = SuperLinkState  # type: ignore[misc]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each waiting node
    freeze()
    flower_commands.run("flower-superlink", arguments)
