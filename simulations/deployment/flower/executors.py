# SPDX-License-Identifier: Apache-2.0
"""Executors, which work on each task in a fork of a process that has imported what it needs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.clientapp import ClientApp
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse, PushTaskOutputRequest
from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import exit_handler
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.superlink.cli.flwr_serverapp import flwr_serverapp

from fedrec.runtime.backoff import Backoff
from fedrec.runtime.forks import forked
from simulations.deployment.flower import pieces
from simulations.deployment.flower.pace import PacedTime
from simulations.deployment.flower.unfinished import UNFINISHED, UnfinishedTasks
from simulations.deployment.flower.work_signal import WorkSignal

PIECES_WAIT = 60.0
"""Seconds that the ServerApp waits for the pieces of an announced reply; with Flower's two hours a
node could block a round by never sending them."""
FIRST_POLL = 0.1
"""Seconds after a task until an executor polls for the next one; or the interval of the
environment, if longer."""
SERVER_POLL = 1.0
CLIENT_POLL = 30.0
"""Longest time in seconds between two polls of an idle executor: the server's as in Flower; a
node's executor is woken by a work signal and polls only for missed ones."""
LoadApp = Callable[[str, str, str], ClientApp]

# Imported by name, because their packages define functions of the same names.
http_grid: Any = importlib.import_module("flwr.superlink.grid.http_grid")
run_clientapp: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
run_superexec: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")


class ForkExecutor:
    """Runs each task in a fork of this process, which has imported all modules.

    Args:
        kind: of the tasks that are run, and no others.
        become: runs a task in the fork.
        backoff: the sleeps between two polls for a task.
        unfinished: where tasks are noted; those of an earlier executor have failed.
    """

    def __init__(
        self,
        kind: TaskType,
        become: Callable[[ExecutionSpec], None],
        backoff: Backoff,
        unfinished: UnfinishedTasks | None = None,
    ) -> None:
        self._kind = kind
        self._become = become
        self._backoff = backoff
        self._unfinished = unfinished or UnfinishedTasks(None)
        for spec in self._unfinished.take():
            _report_failure(spec, "ended together with its executor")
        self._children: dict[int, ExecutionSpec] = {}

    def get_eligible_capacity(
        self, supported_task_types: set[TaskType], **_: Any
    ) -> tuple[set[TaskType], set[str]]:
        """Tasks of one kind."""
        return {self._kind} & supported_task_types, set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Run one task in a child."""
        self._backoff.restart()
        self._unfinished.add(spec)
        self._children[forked(partial(self._run, spec))] = spec
        return LaunchResult.accepted()

    def _run(self, spec: ExecutionSpec) -> None:
        exit_handler.registered_exit_handlers.clear()  # the parent's
        try:
            self._become(spec)
        except Exception as error:  # before Flower's own error handling, which ends the process
            _report_failure(spec, f"{type(error).__name__}: {error}")
            raise

    def reconcile(self) -> None:
        """Collect children that have ended; a killed one is reported to Flower immediately, and not
        after a minute."""
        for child, spec in list(self._children.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del self._children[child]
                self._unfinished.remove(spec)
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
    """Report the failure of a task on behalf of its process; if the report is lost, Flower detects
    it later."""
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
        print(
            f"task {spec.task_id} {reason}, which could not be reported: {error}",
            file=sys.stderr,
            flush=True,
        )
    finally:
        client.close()


def _certificates(spec: ExecutionSpec) -> bytes | None:
    return (
        None
        if spec.root_certificates_path is None
        else Path(spec.root_certificates_path).read_bytes()
    )


class TolerantClient(RuntimeHttpClient):
    """An executor's calls, which are repeated if they fail on the server. Flower's executor exits
    instead, for example because of a busy database, and with it its ServerApp and the run."""

    def AcquireTask(self, request: AcquireTaskRequest) -> AcquireTaskResponse:
        """A task, or none."""
        try:
            return super().AcquireTask(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500:
                raise
            return AcquireTaskResponse()


def server_executor(arguments: list[str]) -> None:
    """`flower-superexec` that forks ServerApps, and survives a failed call."""
    _execute(
        TaskType.SERVER_APP,
        _serve_run,
        Backoff(FIRST_POLL, SERVER_POLL),
        WorkSignal(None),
        arguments,
    )


def client_executor(arguments: list[str], load_app: LoadApp, work_signal: WorkSignal) -> None:
    """`flower-superexec` that forks ClientApps, woken by a work signal."""
    become = partial(_work_on_message, load_app=load_app)
    _execute(TaskType.CLIENT_APP, become, Backoff(FIRST_POLL, CLIENT_POLL), work_signal, arguments)


def _execute(
    kind: TaskType,
    become: Callable[[ExecutionSpec], None],
    backoff: Backoff,
    work_signal: WorkSignal,
    arguments: list[str],
) -> None:
    run_superexec.RuntimeHttpClient = TolerantClient
    sleep = work_signal.listen().sleep
    run_superexec.time = PacedTime(lambda interval: max(interval, backoff.next()), sleep)
    folder = os.environ.get(UNFINISHED)
    unfinished = UnfinishedTasks(None if folder is None else Path(folder))
    run_superexec.get_executor = lambda *_, **__: ForkExecutor(kind, become, backoff, unfinished)
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()


def _work_on_message(spec: ExecutionSpec, *, load_app: LoadApp) -> None:
    pieces.use()
    # the node's own code, never the app bundle's
    run_clientapp.get_load_client_app_fn = lambda **_: load_app
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
    pieces.use()
    http_grid.pull_objects = partial(pieces.pull, max_time=PIECES_WAIT)
    certificates = (
        ()
        if spec.root_certificates_path is None
        else ("--root-certificates", spec.root_certificates_path)
    )
    sys.argv = [
        "flwr-serverapp",
        "--runtime-api-address",
        spec.runtime_api_address,
        "--token",
        spec.token,
    ]
    sys.argv += [*certificates, "--parent-pid", str(os.getppid())]
    flwr_serverapp()
