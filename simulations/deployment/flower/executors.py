# SPDX-License-Identifier: Apache-2.0
"""Executors of the server and of nodes: Flower's, which work on each task in a fork."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from fedrec.runtime.backoff import Backoff
from simulations import flower_commands
from simulations.deployment.flower.patches import executor_loop, own_code, pieces
from simulations.deployment.flower.patches.executor_loop import ForkExecutor
from simulations.deployment.flower.patches.own_code import LoadApp
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
SERVER_APP = "flwr-serverapp"
CLIENT_APP = "flwr-clientapp"
"""Kinds of tasks, named by Flower's commands that work on them."""


def server_executor(arguments: list[str]) -> None:
    """`flower-superexec` that forks ServerApps, and survives a failed call."""
    pieces.use(longest_wait=PIECES_WAIT)
    _execute(SERVER_APP, Backoff(FIRST_POLL, SERVER_POLL), WorkSignal(None), arguments)


def client_executor(arguments: list[str], load_app: LoadApp, work_signal: WorkSignal) -> None:
    """`flower-superexec` that forks ClientApps, woken by a work signal."""
    pieces.use()
    own_code.use(load_app)
    _execute(CLIENT_APP, Backoff(FIRST_POLL, CLIENT_POLL), work_signal, arguments)


def _execute(kind: str, backoff: Backoff, work_signal: WorkSignal, arguments: list[str]) -> None:
    flower_commands.load(kind)  # once for all forks
    folder = os.environ.get(UNFINISHED)
    unfinished = UnfinishedTasks(None if folder is None else Path(folder))
    executor = ForkExecutor(kind, partial(_work_on, kind), backoff, unfinished)
    executor_loop.use(executor, backoff, work_signal)
    flower_commands.run("flower-superexec", arguments)


def _work_on(kind: str, task: Any) -> None:
    """Run Flower's command for one task."""
    arguments = ["--runtime-api-address", task.runtime_api_address, "--token", task.token]
    if task.root_certificates_path is not None:
        arguments += ["--root-certificates", task.root_certificates_path]
    flower_commands.run(kind, [*arguments, "--parent-pid", str(os.getppid())])
