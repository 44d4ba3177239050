# SPDX-License-Identifier: Apache-2.0
"""Operator commands of a deployment: start, register, status, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from fedrec.errors import EngineError, FedrecError
from fedrec.runtime.files import read_json
from simulations.deployment.layout import REVOKED_KEY, Deployment, check_certificates
from simulations.deployment.processes import (
    OPERATOR,
    Process,
    Supervisor,
    environment_of,
    node_process,
    python,
    server_processes,
)
from simulations.flower_commands import is_healthy, last_lines

if TYPE_CHECKING:
    from fedrec.report.page.sections import PageTable
    from simulations.deployment.client import ClientPlan

START_SECONDS = 90.0


class ProcessState(NamedTuple):
    """Status of a process: `pid` is None if it does not run, `healthy` None if it has no health
    check."""

    name: str
    pid: int | None
    restarts: int
    healthy: bool | None


def up(deployment: Deployment, *, wait: float = START_SECONDS) -> None:
    """Start all stopped processes, register the nodes' keys, and wait until all are healthy.

    Raises:
        DataError: the data of a node on this machine do not match the catalogue.
        EngineError: a process did not start before the timeout; with its name and the end of its
            log.
        RunError: a certificate has expired.
    """
    check_certificates(deployment)
    here = local_plans(deployment)
    for plan in here:
        plan.check_data()
    if supervisor_of(deployment) is None:
        _start_supervisor(deployment)
    deadline = time.monotonic() + wait
    for process in server_processes(deployment):
        if process.health and not _wait(partial(_answers, process, deployment), deadline):
            log = deployment.logs / f"{process.name}.txt"
            raise EngineError(
                f"{process.name} did not start: no answer from {process.health}",
                got=last_lines(log),
                fix=f"see {log}; is its port free?",
            )
    register_nodes(deployment)
    _wait_for_nodes(deployment, len(here), deadline)


def down(deployment: Deployment, *, wait: float = 45.0) -> bool:
    """Stop all processes; return True if any ran.

    Raises:
        EngineError: the supervisor does not stop.
    """
    pid = supervisor_of(deployment)
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    if _wait(lambda: not _is_ours(deployment, pid), time.monotonic() + wait):
        return True
    raise EngineError(
        f"the supervisor (process {pid}) did not stop within {wait:g} s", fix=f"kill -9 -- -{pid}"
    )


def register_nodes(deployment: Deployment) -> dict[str, int]:
    """Register all nodes whose keys are in the deployment folder, remove revoked ones, and return
    the registered ids.

    Raises:
        EngineError: the SuperLink refused.
    """
    from simulations.deployment.superlink import Control

    with Control(deployment) as control:
        ids = {
            folder.name: control.register((folder / "node.pub").read_bytes(), folder.name)
            for folder in deployment.node_folders()
        }
        for number in deployment.settings.revoked:
            control.unregister((deployment.node(number) / REVOKED_KEY).read_bytes())
    # in a container the folder may be read-only, and this file is not needed
    with suppress(OSError):
        deployment.registered.touch()
    return ids


def states(deployment: Deployment) -> list[ProcessState]:
    """The status of each process of the deployment."""
    table = _table(deployment)
    running = table.get("processes", {}) if supervisor_of(deployment) is not None else {}
    states = []
    for process in [*server_processes(deployment), *node_process(deployment)]:
        entry = running.get(process.name, {})
        pid = entry.get("pid")
        alive = pid is not None and Path(f"/proc/{pid}").exists()
        healthy = None if process.health is None else alive and _answers(process, deployment)
        states.append(
            ProcessState(process.name, pid if alive else None, entry.get("restarts", 0), healthy)
        )
    return states


def process_table(states: Sequence[ProcessState]) -> PageTable:
    """Table of processes."""
    from fedrec.report.page.sections import PageTable, Row

    health = {None: "", True: "healthy", False: "no answer"}
    rows = []
    for state in states:
        pid = "not running" if state.pid is None else str(state.pid)
        rows.append(Row(state.name, (pid, str(state.restarts), health[state.healthy])))
    heads = "process", "pid", "restarts", "health"
    return PageTable("processes of this machine", heads, tuple(rows))


def node_table(nodes: Sequence[Any]) -> PageTable:
    """Table of registered nodes."""
    from fedrec.report.page.sections import PageTable, Row
    from simulations.deployment.superlink import heard

    now = time.time()
    online = sum(node.status == "online" for node in nodes)
    title = f"nodes: {online:,} of {len(nodes):,} registered nodes online"
    rows = tuple(
        Row(node.name, (node.status, heard(node, now)))
        for node in sorted(nodes, key=lambda node: (len(node.name), node.name))
    )
    return PageTable(title, ("node", "status", "last heartbeat"), rows)


def supervisor_of(deployment: Deployment) -> int | None:
    """Process id of the running supervisor."""
    pid = _table(deployment).get("supervisor")
    return int(pid) if pid is not None and _is_ours(deployment, int(pid)) else None


def _is_ours(deployment: Deployment, pid: int) -> bool:
    """Return True if a process belongs to this deployment, not to another program that reuses its
    process id."""
    try:
        return str(deployment.path).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _answers(process: Process, deployment: Deployment) -> bool:
    return is_healthy(str(process.health), deployment.authority)


def _start_supervisor(deployment: Deployment) -> None:
    command = (*python(OPERATOR), "supervise", str(deployment.path))
    log = os.open(deployment.logs / "supervisor.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    with os.fdopen(log, "wb") as output:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment_of(Process("supervisor", command)),
            start_new_session=True,
            cwd=deployment.path,
        )


def _wait(done: Callable[[], bool], deadline: float) -> bool:
    """Return True once `done` is, False after a deadline of the monotonic clock."""
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _wait_for_nodes(deployment: Deployment, count: int, deadline: float) -> None:
    from simulations.deployment.superlink import Control

    online = 0
    with Control(deployment) as control:
        while online < count:
            # the SuperLink is busy when many nodes connect at the same time
            with suppress(httpx.TransportError):
                online = sum(node.status == "online" for node in control.nodes())
            if online < count and time.monotonic() > deadline:
                raise EngineError(
                    f"not all nodes came online: {online} of {count}",
                    fix=f"see {deployment.logs}/nodes.txt and {deployment.logs}/nodes/*",
                )
            time.sleep(0.1)


def _table(deployment: Deployment) -> dict:
    """Process list of the supervisor; empty if none runs."""
    with suppress(OSError):
        return read_json(deployment.logs / "processes.json")
    return {}


def local_plans(deployment: Deployment) -> list[ClientPlan]:
    """Plans of the nodes on this machine, those with data in their folder. Other nodes run
    elsewhere."""
    from simulations.deployment import client

    if not node_process(deployment):
        return []
    plans = [
        client.ClientPlan(
            deployment.node(number),
            deployment.gateway,
            port=deployment.settings.node_port + number - 1,
        )
        for number in deployment.numbers
    ]
    return [plan for plan in plans if plan.data.is_file()]


def _run_nodes_here(deployment: Deployment) -> None:
    """Run the deployment's nodes on this machine until a stop signal, as process `nodes`. A node
    that cannot run is skipped, with its error in the log."""
    from simulations.deployment import client

    processes = []
    for plan in local_plans(deployment):
        try:
            client.prepare(plan)
        except FedrecError as error:
            print(f"{plan.join.name} is not started: {error}", file=sys.stderr, flush=True)
            continue
        for process in client.client_processes(plan):
            processes.append(replace(process, name=f"{plan.join.name}/{process.name}"))
    client.run_nodes(processes, deployment.logs / "nodes")


def main(part: str, folder: str) -> None:
    """Run a deployment's processes (`supervise`, which `up` starts in the background), or its nodes
    (`nodes`), until a stop signal."""
    deployment = Deployment(Path(folder))
    if part == "nodes":
        _run_nodes_here(deployment)
        return
    Supervisor([*server_processes(deployment), *node_process(deployment)], deployment.logs).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
