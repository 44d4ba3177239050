# SPDX-License-Identifier: Apache-2.0
"""The only imports of Flower's private modules, for nodes of a deployment.

Flower's SuperNode polls every 3 s and starts a new Python for every message, which takes 2 s to import torch. Here its
waits are shortened while there is work, and its executor forks a process that has everything imported already. Both are
Flower's own programs with these parts exchanged; a test names what broke when a new version of Flower moves them.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from flwr.clientapp import ClientApp
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest, StopRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse
from flwr.supercore import heartbeat
from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.exit import exit_handler
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.superlink.cli.flower_superlink import flower_superlink
from flwr.supernode import fleet_http_connection
from flwr.supernode.cli.flower_supernode import flower_supernode

FLOWER_POLL = 3.0
"""Seconds that Flower's SuperNode sleeps between two questions for a message; shorter sleeps wait for a reply."""
HEARTBEAT = 15.0
"""Seconds between a node's signs of life (Flower's default is 30, its least 10); a node is given up after two. Shorter
brings a killed node back sooner; longer lets the SuperLink be away for longer before it gives up living nodes."""
DATABASE_WAIT_MS = 60_000
"""Milliseconds that the SuperLink waits for a lock on its database."""
LoadApp = Callable[[str, str, str], ClientApp]

# By name, because their packages give functions of the same names.
run_clientapp: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
sql_mixin: Any = importlib.import_module("flwr.supercore.sql_mixin")
run_superexec: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
start_client_internal: Any = importlib.import_module("flwr.supernode.start_client_internal")
importlib.import_module("flwr.supernode.main")  # which each SuperNode would import by itself


class PacedTime:
    """Stands for the module `time` in the SuperNode's loop: polls fast after a message, ever slower without.

    Args:
        fastest: seconds of the first sleep after a message.
        growth: factor from one sleep to the next, up to Flower's own 3 s.
        sleep: what sleeps.
    """

    def __init__(self, fastest: float = 0.1, growth: float = 1.3, sleep: Callable[[float], None] = time.sleep) -> None:
        self._fastest, self._growth, self._sleep = fastest, growth, sleep
        self._next = fastest

    def sleep(self, seconds: float) -> None:
        """Sleep at most so long."""
        if seconds < FLOWER_POLL:  # it waits for the reply to a message: there is work
            self._next = self._fastest
            self._sleep(min(seconds, 0.03))
            return
        self._sleep(self._next)
        self._next = min(self._next * self._growth, FLOWER_POLL)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class ForkExecutor:
    """Runs each message in a fork of this process, which has imported everything.

    Args:
        load_app: gives the ClientApp by Flower's id, version and hash of the app bundle, or raises.
    """

    def __init__(self, load_app: LoadApp) -> None:
        self._load_app = load_app
        self._children: set[int] = set()

    def get_eligible_capacity(self, supported_task_types: set[TaskType], **_: Any) -> tuple[set[TaskType], set[str]]:
        """Only ClientApps are run."""
        return {TaskType.CLIENT_APP} & supported_task_types, set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Run one message in a child."""
        child = os.fork()
        if child:
            self._children.add(child)
            return LaunchResult.accepted()
        code = 1
        try:
            _become_task(spec, self._load_app)
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            # Nothing of the parent's is closed here: its connection is shared.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def reconcile(self) -> None:
        """Collect children that have ended."""
        for child in list(self._children):
            if os.waitpid(child, os.WNOHANG)[0]:
                self._children.discard(child)

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            try:
                os.kill(child, signal.SIGTERM)
            except ProcessLookupError:
                continue


def _become_task(spec: ExecutionSpec, load_app: LoadApp) -> None:
    exit_handler.registered_exit_handlers.clear()
    run_clientapp.get_load_client_app_fn = lambda **_: load_app  # the node's own code, never the app bundle's
    run_clientapp.install_from_fab = lambda *_, **__: None
    root = spec.root_certificates_path
    certificates = None
    if root is not None:
        with open(root, "rb") as file:
            certificates = file.read()
    run_clientapp.run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=spec.insecure,
        certificates=certificates,
        parent_pid=spec.parent_pid,
        runtime_dependency_install=False,
    )


def supernode(arguments: list[str]) -> None:
    """`flower-supernode` with shorter waits and faster signs of life."""
    start_client_internal.time = PacedTime()  # type: ignore[attr-defined]
    for module in (heartbeat, fleet_http_connection):
        module.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT  # type: ignore[attr-defined]
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


class TolerantClient(RuntimeHttpClient):
    """An executor's calls, of which one that fails on the server is made again later.

    Flower's executor ends instead, and the ServerApp that it started ends with it: the whole run, for a busy database.
    """

    def AcquireTask(self, request: AcquireTaskRequest) -> AcquireTaskResponse:
        """A task, or none."""
        try:
            return super().AcquireTask(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500:
                raise
            return AcquireTaskResponse()


def superlink(arguments: list[str]) -> None:
    """`flower-superlink` that waits longer for its database than 5 s, which a busy machine may take."""
    kept = [(name, value) for name, value in sql_mixin.SQLITE_PRAGMAS if name != "busy_timeout"]
    sql_mixin.SQLITE_PRAGMAS = (("busy_timeout", str(DATABASE_WAIT_MS)), *kept)
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def server_executor(arguments: list[str]) -> None:
    """`flower-superexec` that outlives a failed call."""
    run_superexec.RuntimeHttpClient = TolerantClient
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()


def client_executor(arguments: list[str], load_app: LoadApp) -> None:
    """`flower-superexec` that forks ClientApps."""
    run_superexec.RuntimeHttpClient = TolerantClient
    run_superexec.get_executor = lambda *_, **__: ForkExecutor(load_app)
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()


@dataclass(frozen=True)
class NodeState:
    """What the SuperLink knows of a registered node."""

    node: int
    status: str
    public_key: bytes


@dataclass(frozen=True)
class RunState:
    """What the SuperLink knows of a run: `status` such as `running` or `finished:failed`."""

    run: int
    status: str


class Control:
    """The operator's calls to a SuperLink.

    Args:
        address: HOST:PORT of the SuperLink.
        authority: certificate of the authority that signed its own.
    """

    def __init__(self, address: str, authority: Path) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="flwr-cli")
        self._client = ControlHttpClient.from_server_address(
            address, insecure=False, root_certificates=authority.read_bytes(), interceptors=[version]
        )

    def register(self, public_key: bytes, name: str) -> int:
        """Let a node in, by its public key in OpenSSH's format; gives its id, also of one that is in already."""
        point = public_key_to_bytes(serialization.load_ssh_public_key(public_key))  # type: ignore[arg-type]
        for known in self.nodes():
            if known.public_key == point:
                return known.node
        return self._client.RegisterNode(RegisterNodeRequest(public_key=point, name=name)).node_id

    def nodes(self) -> list[NodeState]:
        """All registered nodes."""
        found = self._client.ListNodes(ListNodesRequest()).nodes_info
        return [NodeState(node.node_id, node.status, node.public_key) for node in found]

    def runs(self) -> list[RunState]:
        """All runs, newest first."""
        runs = self._client.ListRuns(ListRunsRequest()).run_dict.values()
        found = [(run.pending_at, run.run_id, f"{run.status.status}:{run.status.sub_status}") for run in runs]
        return [RunState(run, status.rstrip(":")) for _, run, status in sorted(found, reverse=True)]

    def stop(self, run: int) -> None:
        """End a run; its run folder can be resumed."""
        self._client.StopRun(StopRunRequest(run_id=run))

    def close(self) -> None:
        """Hang up."""
        self._client.close()
