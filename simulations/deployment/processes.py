# SPDX-License-Identifier: Apache-2.0
"""The processes of a deployment: command lines and supervision."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedrec.errors import EngineError
from fedrec.runtime.process import Backoff, Fork
from simulations.deployment.layout import Deployment, private_folder, write_private
from simulations.flower_commands import environment_with, groups_end, signal_groups

SERVER = "simulations.deployment.superlink"
OPERATOR = "simulations.deployment.operator"
"""Modules that run as programs."""
IN_CONTAINER = "FEDREC_CONTAINER"
"""Set in the environment of the image."""


@dataclass(frozen=True)
class Process:
    """A process that is started, monitored and restarted.

    Attributes:
        name: its name, also that of its log.
        command: the command line.
        environment: variables in addition to the caller's environment.
        health: URL that responds when it is healthy; empty for a process without a port.
        after: file that must exist before it is started; such processes are stopped first.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str | None = None
    after: Path | None = None


def server_processes(deployment: Deployment) -> list[Process]:
    """Processes of the SuperLink, the ServerApp's executor, and the gateway."""
    settings = deployment.settings
    server = deployment.server
    home = {"FLWR_HOME": str(deployment.flower_home)}
    secret = server / "superexec.secret"
    superlink = (
        *flags(host="127.0.0.1", port=settings.superlink_port),
        *flags(ssl_certfile=server / "superlink.crt", ssl_keyfile=server / "superlink.key"),
        *flags(ssl_ca_certfile=deployment.authority),
        "--enable-supernode-auth",
        *flags(isolation="process", database=server / "superlink.db"),
        "--disable-runtime-dependency-installation",
        *flags(superexec_auth_secret_file=secret),
    )
    executor = executor_flags(deployment.superlink, deployment.authority, secret)
    gateway = (
        *flags(host=settings.bind, port=settings.port, upstream=deployment.superlink),
        *flags(certificate=server / "gateway.crt", key=server / "gateway.key"),
        *flags(authority=deployment.authority, nodes=deployment.path / "nodes"),
    )
    health = f"https://{deployment.superlink}/health"
    return [
        Process("superlink", (*python(SERVER), "superlink", *superlink), home, health),
        Process("serverapp", (*python(SERVER), "executor", *executor), home),
        Process(
            "gateway",
            (*python("simulations.cli"), "deploy", "gateway", *gateway),
            health=f"https://127.0.0.1:{settings.port}/health",
        ),
    ]


def flags(**values: object) -> tuple[str, ...]:
    """Command-line options for keyword arguments, such as `--port 8443` for `port=8443`."""
    named = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items())
    return tuple(part for pair in named for part in pair)


def executor_flags(address: str, authority: Path, secret: Path) -> tuple[str, ...]:
    """Flags of an executor of the server or a node."""
    return flags(
        runtime_api_address=address, root_certificates=authority, superexec_auth_secret_file=secret
    )


def node_process(deployment: Deployment) -> list[Process]:
    """Process from which the nodes on this machine fork, if there are any."""
    if not deployment.settings.local_nodes or not deployment.numbers:
        return []
    command = (*python(OPERATOR), "nodes", str(deployment.path))
    return [Process("nodes", command, after=deployment.registered)]


def environment_of(process: Process) -> dict[str, str]:
    """Complete environment of a process, with Flower's variables and this project's packages."""
    root = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(
        dict.fromkeys([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    ).strip(":")
    # One thread per process: many processes share a machine, and the batches of one client are too
    # small to split.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return environment_with({**threads, "PYTHONPATH": search, **process.environment})


def python(module: str) -> tuple[str, ...]:
    """Beginning of a command line that runs one of our modules."""
    return (sys.executable, "-m", module)


def check_container_user() -> None:
    """Check that the user in a container is not root.

    Raises:
        EngineError: this is a container, and its user is root.
    """
    if os.environ.get(IN_CONTAINER) and os.getuid() == 0:
        raise EngineError(
            "the containers of a deployment must not run as root",
            fix="fedrec deploy add-nodes DEPLOYMENT 0 writes .env; then docker compose up again",
        )


# Starts, restarts and stops processes, like Docker's restart policy without Docker.
#
# A SuperNode that was killed is refused until its last heartbeat is 30 s old (60 s with Flower's
# default), and exits each time; so a process is restarted for as long as the supervisor runs, at
# first at once and then every few seconds. The supervisor writes the process ids into
# `processes.json`, readable by its owner only.

REFUSED = 77
"""Exit status of a SuperNode whose key the server rejects."""
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 5.0
_WELL_AFTER = 30.0  # a process that ran this long is restarted immediately
_STOP_SECONDS = 12.0
_PR_SET_PDEATHSIG = 1


_REFUSAL = """\
{name}: the server does not accept this node's key; the connection is retried every few seconds.
  expected: a registered key
  got: a key that is not registered or was revoked, or a clock that differs from the server's; the
    key of a node that was killed is refused for up to a minute
  fix: ask the operator to run fedrec deploy register DEPLOYMENT, or for a new folder"""
Main = Callable[[list[str]], None]


class Supervisor:
    """Runs processes until a stop signal.

    Args:
        processes: the processes.
        folder: folder for logs and the list of processes.
        patience: seconds after which processes that do not stop are killed.
        mains: functions by name; a process whose command begins with such a name is a fork that
            runs the function with the other arguments.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        folder: Path,
        patience: float = _STOP_SECONDS,
        mains: Mapping[str, Main] | None = None,
    ) -> None:
        self.processes = processes
        self.folder = private_folder(folder)
        self._patience = patience
        self._mains = mains or {}
        self._running: dict[str, subprocess.Popen[bytes] | Fork] = {}
        self._started: dict[str, float] = {}
        self._restarts: Counter[str] = Counter()
        self._due: defaultdict[str, float] = defaultdict(float)  # by the monotonic clock
        self._waits = {p.name: Backoff(_FIRST_WAIT, _LONGEST_WAIT, 2.0) for p in processes}
        self._refused: set[str] = set()  # processes whose refusal was reported
        self._stopping = False

    def run(self) -> None:
        """Run until SIGTERM or SIGINT, then stop all processes."""
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
        """Start the processes that are due; return True if anything changed."""
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
        ended = self._running.pop(name)
        signal_groups([ended.pid], signal.SIGTERM)  # its children must not outlive it
        if ended.poll() == REFUSED and name not in self._refused:
            self._refused.add(name)
            print(_REFUSAL.format(name=name), file=sys.stderr, flush=True)
        self._restarts[name] += 1
        if now - self._started[name] > _WELL_AFTER:
            self._waits[name].restart()
        self._due[name] = now + self._waits[name].next()

    def _start(self, process: Process) -> subprocess.Popen[bytes] | Fork:
        log = self._open_log(process)
        try:
            if process.command[0] in self._mains:
                return Fork(partial(self._become, process, log))
            return subprocess.Popen(
                process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_of(process),
                cwd=self.folder,
                start_new_session=True,  # so that it and its children can be stopped together
                preexec_fn=_end_with_parent,
            )
        finally:
            os.close(log)

    def _become(self, process: Process, log: int) -> None:
        os.setsid()
        _end_with_parent()
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.update(process.environment)
        self._mains[process.command[0]](list(process.command[1:]))

    def _open_log(self, process: Process) -> int:
        file = self.folder / f"{process.name}.txt"
        private_folder(file.parent)
        return os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def _write(self) -> None:
        table = {
            process.name: {
                "pid": running.pid if (running := self._running.get(process.name)) else None,
                "restarts": self._restarts[process.name],
            }
            for process in self.processes
        }
        write_private(
            self.folder / "processes.json",
            json.dumps({"supervisor": os.getpid(), "processes": table}),
        )

    def _end(self) -> None:
        """Stop processes, dependent ones first: a node can only unregister from a running
        server."""
        for waits in (True, False):
            names = [p.name for p in self.processes if (p.after is not None) is waits]
            self._end_of([self._running[name] for name in names if name in self._running])
        (self.folder / "processes.json").unlink(missing_ok=True)

    def _end_of(self, running: Sequence[subprocess.Popen[bytes] | Fork]) -> None:
        groups = {process.pid for process in running}
        for sign, seconds in ((signal.SIGTERM, self._patience), (signal.SIGKILL, 2.0)):
            signal_groups(groups, sign)
            ended = groups_end(groups, seconds)
            for process in running:
                process.poll()
            if ended:
                break


def _end_with_parent() -> None:
    """Let a child process get a stop signal when its supervisor ends for any reason (Linux
    only)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
