# SPDX-License-Identifier: Apache-2.0
"""Patches of Flower's processes: sleep times, executors, heartbeats, own code, and replies of a
SuperNode."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.supercore import heartbeat
from flwr.supernode.nodestate import nodestate_factory
from uvicorn import Server

from fedrec.runtime.process import Backoff, Fork
from simulations.deployment.health import WorkSignal
from simulations.deployment.processes import UnfinishedTasks

# Replaces the sleep times of Flower's polling loops, and of the web server in a SuperNode.
#
# Missing in Flower: settings for them. A SuperNode polls every 3 s, and looks for a reply every .5
# s.

TICK = 1.0
"""Seconds between two checks of a web server for its end (uvicorn: .1, which is most of the cost of
an idle SuperNode)."""


class PacedTime:
    """Replaces the module `time` in one of Flower's loops.

    Args:
        pace: maps the seconds that the loop would sleep to those that it sleeps.
        sleep: function that sleeps.
    """

    def __init__(
        self, pace: Callable[[float], float], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._pace = pace
        self._sleep = sleep

    def sleep(self, seconds: float) -> None:
        """Sleep for the mapped time."""
        self._sleep(self._pace(seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


async def ticking(self: Server) -> None:
    """Replaces uvicorn's `Server.main_loop`."""
    while not await self.on_tick(0):
        await asyncio.sleep(TICK)


# An executor that works on each task in a fork of its process, which has imported what it needs.
#
# Missing in Flower: an executor that does not start a new Python for a task, that is woken for one
# instead of polling, that reports a killed task at once, and that survives a failed call.

AGAIN = 1.0
"""Seconds until a call that failed on the server is repeated."""

# Imported by name, because their packages define functions of the same names.
run_superexec: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
run_clientapp: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")


def use_own_loop(executor: ForkExecutor, backoff: Backoff, work_signal: WorkSignal) -> None:
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


# The intervals of heartbeats: a lost node is found sooner, a busy ServerApp is not taken for lost.
#
# Missing in Flower: settings for them. A node sends a heartbeat every 30 s and is lost after two; a
# ServerApp is lost after 60 s without one.

HEARTBEAT = 15.0
"""Seconds between a node's heartbeats (Flower's default is 30, its minimum 10); a node is lost
after two. With shorter intervals a killed node is replaced earlier; with longer ones the SuperLink
may be offline for longer before it regards nodes as lost."""
TASK_SILENCE = 150.0
"""Half of the seconds without a heartbeat after which the SuperLink regards a ServerApp as lost
(Flower: 30); long enough for a machine to be suspended for some minutes. The executor reports a
ServerApp that ended immediately."""


class NodeHeartbeats:
    """The state of a SuperLink whose nodes are lost after two of `HEARTBEAT`."""

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """As Flower's."""
        return super().activate_node(node_id, min(heartbeat_interval, HEARTBEAT))  # type: ignore[misc]

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        """As Flower's."""
        return super().acknowledge_node_heartbeat(  # type: ignore[misc]
            node_id, min(heartbeat_interval, HEARTBEAT)
        )


def use_in_supernode() -> None:
    """Send a node's heartbeats every `HEARTBEAT` seconds."""
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT  # type: ignore[attr-defined]


def use_in_superlink() -> None:
    """Regard tasks as lost after two of `TASK_SILENCE`."""
    from flwr.supercore.corestate import sql_corestate

    sql_corestate.HEARTBEAT_DEFAULT_INTERVAL = TASK_SILENCE  # type: ignore[attr-defined]


# A node that runs its own code.
#
# Missing in Flower: a SuperNode that does not run, or even install, the code that the server sends.

LoadApp = Callable[[str, str, str], ClientApp]


def use_own_code(load_app: LoadApp) -> None:
    """Let this process work on messages with an app of its own.

    Args:
        load_app: by the name, version and hash of the server's app.
    """
    run_clientapp.get_load_client_app_fn = lambda **_: load_app
    run_clientapp.install_from_fab = lambda *_, **__: None


# A SuperNode that replies to every message once, and never with the reply to another one.
#
# Missing in Flower: a reply for a process that was killed together with its executor. The SuperNode
# works on one message at a time, and waits for any reply without end: the node would stay online
# and never take a message again. If a run is stopped while a message arrives, Flower's loop forgets
# the message but its state does not: the late reply would be sent as the reply to the next message.

_FINISHED = "finished"
_COMPLETED = "completed"  # status of a task, and that of a finished one, by Flower
_CRASHED = Error(8, "ClientApp stopped responding.")  # as Flower's for a lost process


class AnsweringState(nodestate_factory.InMemoryNodeState):  # type: ignore[misc]
    """The state of a SuperNode that replies to every message once.

    Args:
        object_store: as Flower's.
        work_signal: sent to the executor for each task.
    """

    _newest_task: int | None = None

    def __init__(self, object_store: Any, work_signal: WorkSignal | None = None) -> None:
        super().__init__(object_store)
        self._work_signal = work_signal or WorkSignal(None)
        self._forgotten: deque[str] = deque(maxlen=1000)

    def store_message(self, message: Message) -> str | None:
        """As Flower's; a new message ends those before it."""
        if not message.metadata.reply_to_message_id:
            with self.lock_msg_store:
                stale = [
                    identifier
                    for identifier in self.msg_store
                    if identifier != message.metadata.message_id
                ]
                self._forgotten.extend(stale)
                self.delete_messages(message_ids=stale)
            for identifier in stale:
                self.object_store.delete(identifier)
        return super().store_message(message)

    def get_messages_legacy(self, **asked: Any) -> Sequence[Message]:
        """As Flower's, without replies to ended messages."""
        return [
            message
            for message in super().get_messages_legacy(**asked)
            if message.metadata.reply_to_message_id not in self._forgotten
        ]

    def create_task(self, *args: Any, **kwargs: Any) -> int | None:
        """As Flower's, which keeps all tasks; there is one message, and so one task, at a time. The
        work signal wakes the executor."""
        with self.lock_task_store:
            for task in list(self.task_store.values()):
                if task.status.status == _FINISHED:
                    del self.task_store[task.task_id]
        created = super().create_task(*args, **kwargs)
        self._newest_task = created if created is not None else self._newest_task
        self._work_signal.send()
        return created

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """As Flower's; a task that failed late must not reply to the message after its own."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status != _COMPLETED and task_id == self._newest_task:
            runs = {task.run_id for task in self.get_tasks(task_ids=[task_id])}
            self._store_error_replies(runs, _CRASHED)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """As Flower's, which omits messages that the process had not fetched yet."""
        with self.lock_msg_store:
            for entry in self.msg_store.values():
                if (
                    entry.message.metadata.run_id in run_ids
                    and not entry.message.metadata.reply_to_message_id
                ):
                    entry.is_retrieved = True
            super()._store_error_replies(run_ids, error)
