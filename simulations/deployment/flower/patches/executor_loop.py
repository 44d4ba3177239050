# SPDX-License-Identifier: Apache-2.0
"""An executor that works on each task in a fork of its process, which has imported what it needs.

Missing in Flower: an executor that does not start a new Python for a task, that is woken for one
instead of polling, that reports a killed task at once, and that survives a failed call.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from fedrec.runtime.backoff import Backoff
from fedrec.runtime.forks import Fork
from simulations.deployment.flower.patches.pace import PacedTime
from simulations.deployment.flower.unfinished import UnfinishedTasks
from simulations.deployment.flower.work_signal import WorkSignal

AGAIN = 1.0
"""Seconds until a call that failed on the server is repeated."""

# Imported by name, because their packages define functions of the same names.
run_superexec: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
run_clientapp: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")


def use(executor: ForkExecutor, backoff: Backoff, work_signal: WorkSignal) -> None:
    """Let Flower's executor in this process be this one, woken by a work signal."""
    run_superexec.RuntimeHttpClient = TolerantClient
    sleep = work_signal.listen().sleep
    run_superexec.time = PacedTime(lambda interval: max(interval, backoff.next()), sleep)
    run_superexec.get_executor = lambda *_, **__: executor


class ForkExecutor:
    """Runs each task in a fork of this process, which has imported all modules.

    Args:
        kind: of the tasks that are run, and no others, by the name of Flower's command for them.
        become: runs a task in the fork.
        backoff: the sleeps between two polls for a task.
        unfinished: where tasks are noted; those of an earlier executor have failed.
    """

    def __init__(
        self,
        kind: str,
        become: Callable[[Any], None],
        backoff: Backoff,
        unfinished: UnfinishedTasks | None = None,
    ) -> None:
        self._kind = kind
        self._become = become
        self._backoff = backoff
        self._unfinished = unfinished or UnfinishedTasks(None)
        for spec in self._unfinished.take():
            _report_failure(spec, "ended together with its executor")
        self._children: dict[Fork, Any] = {}

    def get_eligible_capacity(
        self, supported_task_types: set[str], **_: Any
    ) -> tuple[set[str], set[str]]:
        """Tasks of one kind."""
        return {kind for kind in supported_task_types if kind == self._kind}, set()

    def launch(self, spec: Any) -> Any:
        """Run one task in a child."""
        self._backoff.restart()
        self._unfinished.add(spec)
        self._children[Fork(partial(self._run, spec))] = spec
        return run_superexec.LaunchResult.accepted()

    def _run(self, spec: Any) -> None:
        self._children = {}  # the parent's, which its exit handler would end
        try:
            self._become(spec)
        except Exception as error:  # before Flower's own error handling, which ends the process
            _report_failure(spec, f"{type(error).__name__}: {error}")
            raise

    def reconcile(self) -> None:
        """Collect children that have ended; a killed one is reported to Flower immediately, and not
        after a minute."""
        for child, spec in list(self._children.items()):
            code = child.poll()
            if code is not None:
                del self._children[child]
                self._unfinished.remove(spec)
                if code < 0:
                    _report_failure(spec, f"ended by signal {-code}")

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)


def _report_failure(spec: Any, reason: str) -> None:
    """Report the failure of a task on behalf of its process; if the report is lost, Flower detects
    it later.

    Args:
        spec: Flower's description of the task, or what was noted of it.
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
    """An executor's calls, which are repeated if they fail on the server. Flower's executor exits
    instead, for example because of a busy database, and with it its ServerApp and the run."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._owner = os.getpid()

    def AcquireTask(self, request: Any) -> Any:
        """A task, or none."""
        while True:
            try:
                return super().AcquireTask(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500:
                    raise
            time.sleep(AGAIN)

    def close(self) -> None:
        """As Flower's; its forks do not close the connection, which is not theirs."""
        if os.getpid() == self._owner:
            super().close()
