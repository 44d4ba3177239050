# SPDX-License-Identifier: Apache-2.0
"""The only imports of Flower's private modules, for nodes of a deployment.

Flower's SuperNode polls every 3 s and starts a new Python for every message, which takes 2 s to import torch; whoever
finds a piece of a message missing waits 1 s. Here these waits are shorter, and executors fork a process that has
imported what it needs. All are Flower's own programs with these parts exchanged; a test names what broke when a new
version of Flower moves them.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import Status, SubStatus
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest, StopRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse, PushTaskOutputRequest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import heartbeat
from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.exit import exit_handler
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.superlink.cli.flower_superlink import flower_superlink
from flwr.superlink.cli.flwr_serverapp import flwr_serverapp
from flwr.supernode import fleet_http_connection
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.nodestate import in_memory_nodestate
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from sqlalchemy import select

FLOWER_POLL = 3.0
"""Seconds that Flower's SuperNode sleeps between two questions for a message; shorter sleeps wait for a reply."""
FIRST_PULL_WAIT, LONGEST_PULL_WAIT = 0.05, 1.0
"""Seconds before a piece of a message that was announced and is not there yet is asked for again (Flower: 1 and 10)."""
PIECES_WAIT = 60.0
"""Seconds that the ServerApp waits for the pieces of a reply that was announced; Flower's two hours are for whoever
announces a reply and sends it bit by bit, or never."""
HEARTBEAT = 15.0
"""Seconds between a node's signs of life (Flower's default is 30, its least 10); a node is given up after two. Shorter
brings a killed node back sooner; longer lets the SuperLink be away for longer before it gives up living nodes."""
TASK_SILENCE = 150.0
"""Half of the seconds after which the SuperLink gives up a ServerApp that it does not hear of (Flower: 30), so that a
machine may be suspended for some minutes. A ServerApp that ended is reported by its executor, at once."""
DATABASE_WAIT_MS = 60_000
"""Milliseconds that the SuperLink waits for a lock on its database."""
OVERDUE, TIDYING = 120.0, 30.0
"""Seconds that the SuperLink keeps what belongs to a message after its time; least seconds between two looks."""
LoadApp = Callable[[str, str, str], ClientApp]

# By name, because their packages give functions of the same names.
run_clientapp: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
sql_corestate: Any = importlib.import_module("flwr.supercore.corestate.sql_corestate")
sql_mixin: Any = importlib.import_module("flwr.supercore.sql_mixin")
run_superexec: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
linkstate_factory: Any = importlib.import_module("flwr.server.superlink.linkstate.linkstate_factory")
http_grid: Any = importlib.import_module("flwr.superlink.grid.http_grid")
nodestate_factory: Any = importlib.import_module("flwr.supernode.nodestate.nodestate_factory")
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
    """Runs each task in a fork of this process, which has imported what it needs.

    Args:
        kind: of the tasks that are run, and no others.
        become: runs a task in the fork.
    """

    def __init__(self, kind: TaskType, become: Callable[[ExecutionSpec], None]) -> None:
        self._kind, self._become = kind, become
        self._children: dict[int, ExecutionSpec] = {}

    def get_eligible_capacity(self, supported_task_types: set[TaskType], **_: Any) -> tuple[set[TaskType], set[str]]:
        """Tasks of one kind."""
        return {self._kind} & supported_task_types, set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Run one task in a child."""
        child = os.fork()
        if child:
            self._children[child] = spec
            return LaunchResult.accepted()
        code = 1
        try:
            exit_handler.registered_exit_handlers.clear()
            self._become(spec)
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            # Nothing of the parent's is closed here: its connection is shared.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def reconcile(self) -> None:
        """Collect children that have ended; Flower hears at once of one that was killed, and not after a minute."""
        for child, spec in list(self._children.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del self._children[child]
                if os.WIFSIGNALED(status):
                    _report_failure(spec, f"ended by signal {os.WTERMSIG(status)}")

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            try:
                os.kill(child, signal.SIGTERM)
            except ProcessLookupError:
                continue


def _report_failure(spec: ExecutionSpec, reason: str) -> None:
    """Say in the place of a task's process that it failed; if nobody hears it, Flower finds out by itself."""
    client = RuntimeHttpClient.from_server_address(
        server_address=spec.runtime_api_address,
        insecure=spec.insecure,
        root_certificates=_certificates(spec),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            RuntimeTokenHttpInterceptor(spec.token),
        ],
    )
    try:
        client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=reason))
    except httpx.HTTPError as error:
        print(f"task {spec.task_id} {reason}, which could not be reported: {error}", file=sys.stderr, flush=True)
    finally:
        client.close()


def _certificates(spec: ExecutionSpec) -> bytes | None:
    return None if spec.root_certificates_path is None else Path(spec.root_certificates_path).read_bytes()


def _work_on_message(spec: ExecutionSpec, *, load_app: LoadApp) -> None:
    run_clientapp.pull_and_inflate_object_from_tree = _quick(run_clientapp.pull_and_inflate_object_from_tree)
    run_clientapp.get_load_client_app_fn = lambda **_: load_app  # the node's own code, never the app bundle's
    run_clientapp.install_from_fab = lambda *_, **__: None
    run_clientapp.run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=spec.insecure,
        certificates=_certificates(spec),
        parent_pid=spec.parent_pid,
        runtime_dependency_install=False,
    )


def _serve_run(spec: ExecutionSpec) -> None:
    http_grid.pull_objects = _quick(http_grid.pull_objects, max_time=PIECES_WAIT)
    certificates = () if spec.root_certificates_path is None else ("--root-certificates", spec.root_certificates_path)
    sys.argv = ["flwr-serverapp", "--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
    sys.argv += [*certificates, "--parent-pid", str(os.getppid())]
    flwr_serverapp()


def _quick(pull: Callable[..., Any], **settings: float) -> Callable[..., Any]:
    """One of Flower's functions that pull the pieces of a message, with shorter waits."""
    return partial(pull, initial_backoff=FIRST_PULL_WAIT, backoff_cap=LONGEST_PULL_WAIT, **settings)


class AnsweringNodeState(InMemoryNodeState):
    """A SuperNode's memory that answers every message once, and never with the answer to another one.

    Flower's SuperNode works on one message at a time, and waits for any reply without end. A process that was ended
    together with its executor gives none: the node would stay online and never take a message again. A message whose
    run was stopped while it arrived is forgotten by the loop but not by this memory: its late reply would be taken for
    that to the next message, whose own would be left lying.
    """

    _newest_task: int | None = None

    def __init__(self, object_store: ObjectStore) -> None:
        super().__init__(object_store)
        self._forgotten: deque[str] = deque(maxlen=1000)

    def store_message(self, message: Message) -> str | None:
        """See Flower's; a new message means that those before it are done with."""
        if not message.metadata.reply_to_message_id:
            with self.lock_msg_store:
                stale = [identifier for identifier in self.msg_store if identifier != message.metadata.message_id]
                self._forgotten.extend(stale)
                self.delete_messages(message_ids=stale)
            for identifier in stale:
                self.object_store.delete(identifier)
        return super().store_message(message)

    def get_messages_legacy(self, **asked: Any) -> Sequence[Message]:
        """See Flower's, without replies to messages that are done with."""
        found = super().get_messages_legacy(**asked)
        return [message for message in found if message.metadata.reply_to_message_id not in self._forgotten]

    def create_task(self, *args: Any, **kwargs: Any) -> int | None:
        """See Flower's, which keeps all tasks that ever were; one message, and so one task, is in work at a time."""
        with self.lock_task_store:
            for known in [task.task_id for task in self.task_store.values() if task.status.status == Status.FINISHED]:
                del self.task_store[known]
        created = super().create_task(*args, **kwargs)
        self._newest_task = created if created is not None else self._newest_task
        return created

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """See Flower's; a task that failed late must not answer for the message after its own."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status != SubStatus.COMPLETED and task_id == self._newest_task:
            runs = {task.run_id for task in self.get_tasks(task_ids=[task_id])}
            self._store_error_replies(runs, in_memory_nodestate.CLIENT_APP_CRASHED_ERROR)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """See Flower's, which leaves out messages that the process had not fetched yet."""
        with self.lock_msg_store:
            for entry in self.msg_store.values():
                if entry.message.metadata.run_id in run_ids and not entry.message.metadata.reply_to_message_id:
                    entry.is_retrieved = True
            super()._store_error_replies(run_ids, error)


def supernode(arguments: list[str]) -> None:
    """`flower-supernode` with shorter waits, faster signs of life, and an answer to every message."""
    start_client_internal.time = PacedTime()  # type: ignore[attr-defined]
    start_client_internal.pull_objects = _quick(start_client_internal.pull_objects)
    nodestate_factory.InMemoryNodeState = AnsweringNodeState
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


class TidyLinkState(SqlLinkState):
    """The SuperLink's memory without the pieces of messages whose time is over.

    Flower forgets such a message when it is asked for, but keeps the parameters that it carried until the run ends:
    where nodes come and go, half a megabyte for each round of a small model. It also forgets a message before its
    answer has been read, and while a late answer is still being sent; so pieces go `OVERDUE` seconds later.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._forgotten: deque[tuple[float, set[str]]] = deque()
        self._next_look, self._looking = time.monotonic() + TIDYING, Lock()

    def store_message_ins(self, message: Message) -> str | None:
        """See Flower's; now and then, what belongs to messages that are over is forgotten."""
        if time.monotonic() >= self._next_look and self._looking.acquire(blocking=False):
            try:
                self.forget_overdue(time.time() - OVERDUE)
                self.drop_pieces(time.monotonic() - OVERDUE)
            finally:
                self._next_look = time.monotonic() + TIDYING
                self._looking.release()
        return super().store_message_ins(message)

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """See Flower's; remembers whose pieces are to go."""
        if not message_ins_ids:
            return
        answered = MessageRes.reply_to_message_id.in_(message_ins_ids)
        with self.session() as session:
            answers = {str(found) for found in session.scalars(select(MessageRes.message_id).where(answered))}
            super().delete_messages(message_ins_ids)
        self._forgotten.append((time.monotonic(), message_ins_ids | answers))

    def forget_overdue(self, moment: float) -> None:
        """Forget messages whose lifetime ended before a moment, in seconds since 1970, with their answers."""
        ends = MessageIns.created_at + MessageIns.ttl
        with self.session() as session:
            found = session.scalars(select(MessageIns.message_id).where(ends < moment))
            self.delete_messages({str(identifier) for identifier in found})

    def drop_pieces(self, moment: float) -> None:
        """Drop the pieces of messages that were forgotten before a moment of the monotonic clock, if any are left."""
        while self._forgotten and self._forgotten[0][0] < moment:
            for identifier in self._forgotten.popleft()[1]:
                if identifier in self.object_store:
                    self.object_store.delete(identifier)


def superlink(arguments: list[str]) -> None:
    """`flower-superlink` that waits longer for its database than 5 s, and for its runs than a minute."""
    linkstate_factory.SqlLinkState = TidyLinkState
    sql_corestate.HEARTBEAT_DEFAULT_INTERVAL = TASK_SILENCE
    kept = [(name, value) for name, value in sql_mixin.SQLITE_PRAGMAS if name != "busy_timeout"]
    sql_mixin.SQLITE_PRAGMAS = (("busy_timeout", str(DATABASE_WAIT_MS)), *kept)
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def server_executor(arguments: list[str]) -> None:
    """`flower-superexec` that forks ServerApps, and outlives a failed call."""
    run_superexec.RuntimeHttpClient = TolerantClient
    run_superexec.get_executor = lambda *_, **__: ForkExecutor(TaskType.SERVER_APP, _serve_run)
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()


def client_executor(arguments: list[str], load_app: LoadApp) -> None:
    """`flower-superexec` that forks ClientApps."""
    run_superexec.RuntimeHttpClient = TolerantClient
    work = partial(_work_on_message, load_app=load_app)
    run_superexec.get_executor = lambda *_, **__: ForkExecutor(TaskType.CLIENT_APP, work)
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
