# SPDX-License-Identifier: Apache-2.0
"""Starts, restarts and stops processes, like Docker's restart policy without Docker.

A SuperNode that was killed is refused until its last heartbeat is 30 s old (60 s with Flower's
default), and exits each time; so a process is restarted for as long as the supervisor runs, at
first at once and then every few seconds. The supervisor writes the process ids into
`processes.json`, readable by its owner only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from simulations.deployment.pki.keys import private_folder, write_private
from simulations.deployment.processes.commands import Process, environment_of
from simulations.engines import process_groups

_FIRST_WAIT = 0.5
_LONGEST_WAIT = 5.0
_WELL_AFTER = 30.0  # a process that ran this long is restarted immediately
_STOP_SECONDS = 12.0
_PR_SET_PDEATHSIG = 1


class Supervisor:
    """Runs processes until a stop signal.

    Args:
        processes: the processes.
        folder: where logs and the list of processes go.
        patience: seconds after which processes that do not end are killed.
    """

    def __init__(
        self, processes: Sequence[Process], folder: Path, patience: float = _STOP_SECONDS
    ) -> None:
        self.processes = processes
        self.folder = private_folder(folder)
        self._patience = patience
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, float] = {}
        self._restarts: dict[str, int] = {process.name: 0 for process in processes}
        self._due: dict[str, float] = {process.name: 0.0 for process in processes}
        self._waits: dict[str, float] = {process.name: _FIRST_WAIT for process in processes}
        self._stopping = False

    def run(self) -> None:
        """Run until SIGTERM or SIGINT, then stop all."""
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, self._stop)
        try:
            while not self._stopping:
                if self._step():
                    self._write()
                time.sleep(0.1)
        finally:
            self._end()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _step(self) -> bool:
        """Start the processes that are due; returns whether anything changed."""
        changed = False
        now = time.monotonic()
        for process in self.processes:
            running = self._running.get(process.name)
            if running is not None and running.poll() is None:
                continue
            if running is not None:
                self._ended(process.name, now)
                changed = True
            if now >= self._due[process.name] and (process.after is None or process.after.exists()):
                self._running[process.name] = self._start(process)
                self._started[process.name] = now
                changed = True
        return changed

    def _ended(self, name: str, now: float) -> None:
        # Its children must not outlive it.
        process_groups.signal_all([self._running.pop(name).pid], signal.SIGTERM)
        self._restarts[name] += 1
        if now - self._started[name] > _WELL_AFTER:
            self._waits[name] = _FIRST_WAIT
        self._due[name] = now + self._waits[name]
        self._waits[name] = min(2 * self._waits[name], _LONGEST_WAIT)

    def _start(self, process: Process) -> subprocess.Popen[bytes]:
        log = self._open_log(process)
        try:
            return subprocess.Popen(
                process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_of(process),
                cwd=self.folder,
                start_new_session=True,  # so that it and its children can be stopped together
                preexec_fn=end_with_parent,
            )
        finally:
            os.close(log)

    def _open_log(self, process: Process) -> int:
        file = self.folder / f"{process.name}.txt"
        private_folder(file.parent)
        return os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def _write(self) -> None:
        table = {
            name: {
                "pid": self._running[name].pid if name in self._running else None,
                "restarts": restarts,
            }
            for name, restarts in self._restarts.items()
        }
        write_private(
            self.folder / "processes.json",
            json.dumps({"supervisor": os.getpid(), "processes": table}),
        )

    def _end(self) -> None:
        """End processes, those that depend on others first: a node can only unregister from a
        running server."""
        for waits in (True, False):
            names = [
                process.name for process in self.processes if (process.after is not None) is waits
            ]
            self._end_of([self._running[name] for name in names if name in self._running])
        (self.folder / "processes.json").unlink(missing_ok=True)

    def _end_of(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        groups = {process.pid for process in running}
        for sign, seconds in ((signal.SIGTERM, self._patience), (signal.SIGKILL, 2.0)):
            process_groups.signal_all(groups, sign)
            ended = process_groups.ended(groups, seconds)
            for process in running:
                process.poll()
            if ended:
                break


def end_with_parent() -> None:
    """To be called in a child: on Linux, the process gets a stop signal when its supervisor ends,
    for any reason."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
