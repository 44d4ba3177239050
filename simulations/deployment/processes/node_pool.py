# SPDX-License-Identifier: Apache-2.0
"""Nodes as forks of one process that has imported everything.

Importing Flower and torch takes seconds of a core and 250 MiB for each of a node's two processes.
Forks share both (memory is copy-on-write), so a machine can run many more nodes. Nodes are as
isolated from each other as two programs of one user.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fedrec.runtime.forks import Fork
from simulations.deployment.flower.supernode import REFUSED
from simulations.deployment.processes.commands import Process
from simulations.deployment.processes.supervisor import Supervisor, end_with_parent

_REFUSAL = """\
{name}: the server does not accept this node's key, and is asked again every few seconds.
  expected: a registered key
  got: one that is not registered, or was revoked, or a clock that differs from the server's; the
    key of a node that was killed is refused for up to a minute
  fix: ask the operator to run fedrec deploy register DEPLOYMENT, or for another folder"""
Main = Callable[[list[str]], None]


class NodePool(Supervisor):
    """A supervisor whose processes are forks; a process's command is the name of a function and its
    arguments.

    Args:
        processes: the processes.
        folder: where logs and the list of processes go.
        mains: the functions, by name.
        patience: seconds after which processes that do not end are killed.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        folder: Path,
        mains: dict[str, Main],
        patience: float = 6.0,
    ) -> None:
        super().__init__(processes, folder, patience)
        self._mains = mains
        self._told: set[str] = set()  # processes whose refusal was reported

    def _ended(self, name: str, now: float) -> None:
        if self._running[name].poll() == REFUSED and name not in self._told:
            self._told.add(name)
            print(_REFUSAL.format(name=name), file=sys.stderr, flush=True)
        super()._ended(name, now)

    def _start(self, process: Process) -> Fork:  # type: ignore[override]
        log = self._open_log(process)
        child = Fork(partial(self._become, process, log))
        os.close(log)
        return child

    def _become(self, process: Process, log: int) -> None:
        os.setsid()
        end_with_parent()
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.update(process.environment)
        self._mains[process.command[0]](list(process.command[1:]))
