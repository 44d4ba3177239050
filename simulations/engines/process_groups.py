# SPDX-License-Identifier: Apache-2.0
"""Process groups on Linux, and a local Ray without the processes that no run uses.

Starts a local Ray without the processes that no run uses: the monitors of its autoscaler and of
its logs, the server of its dashboard, and the dashboard's and the runtime environments' agents.

Each is a Python of 50 to 60 MiB that takes a second of processor time to start. A raylet ends when
one of its agents ends, so another process stands in for each: it waits until the raylet closes its
input. These are the only changes of Ray's modules; a test reports when a new version of Ray needs
others.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

# Process groups of a process and its descendants, by Linux's `/proc`.

_PAUSE = 0.05  # seconds between two checks


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    group: int


def below(pid: int) -> set[int]:
    """Groups of a process and of all that it has started, directly or not."""
    found = list(_processes())
    groups = set()
    more = {pid}
    known = set(more)
    while more:
        groups |= {one.group for one in found if one.pid in more}
        more = {one.pid for one in found if one.parent in more} - known
        known |= more
    return groups - {os.getpgrp()}


def signal_all(groups: Iterable[int], sign: int) -> None:
    """Send a signal to groups; those that have ended are left out."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, sign)


def ended(groups: set[int], seconds: float) -> bool:
    """Whether all processes of some groups end within a time; those that nobody has waited for
    count as ended."""
    until = time.monotonic() + seconds
    while any(one.group in groups and one.state not in "ZX" for one in _processes()):
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE)
    return True


def _processes() -> Iterator[_Process]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # it has ended
            state, parent, group, *_ = file.read_text().rsplit(")", 1)[1].split()
            yield _Process(int(file.parent.name), state, int(parent), int(group))


_STAND_IN = 'sh -c "exec cat"'  # sh takes further arguments, such as Ray adds
_NOWHERE = "1"  # a port where nobody listens; with 0 the raylet would wait until its agent has one
_RAYLET = {
    "--dashboard_agent_command": _STAND_IN,
    "--runtime_env_agent_command": _STAND_IN,
    "--metrics-agent-port": _NOWHERE,
    "--metrics_export_port": _NOWHERE,
    "--runtime_env_agent_port": _NOWHERE,
    "--dashboard_agent_listen_port": _NOWHERE,
}


@contextmanager
def few_processes() -> Iterator[None]:
    """A local Ray that is started in the block has no more processes than it needs: all, if its
    workers are to run in an environment that an agent makes for them."""
    if _agents_are_needed():
        yield
        return
    node: Any = importlib.import_module("ray._private.node").Node
    services: Any = importlib.import_module("ray._private.services")
    begin = services.start_ray_process

    def begun(command: list[str], kind: str, *more: Any, **named: Any) -> Any:
        line = _without_agents(command) if kind == "raylet" else command
        return begin(line, kind, *more, **named)

    with ExitStack() as stack:
        for name in ("start_monitor", "start_log_monitor", "start_api_server"):
            stack.enter_context(_replaced(node, name, _nothing))
        stack.enter_context(_replaced(services, "start_ray_process", begun))
        yield


def _agents_are_needed() -> bool:
    """Whether Ray would give its workers an environment of their own, as it does below `uv run`."""
    worker: Any = importlib.import_module("ray._private.worker")
    asked = worker.RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ
    return asked or bool(worker._maybe_modify_runtime_env(None, False))


def _without_agents(command: list[str]) -> list[str]:
    """A raylet's command line, with stand-ins for its agents."""
    others = [part for part in command if part.partition("=")[0] not in _RAYLET]
    return [*others, *(f"{name}={value}" for name, value in _RAYLET.items())]


def _nothing(*_: Any, **__: Any) -> None:
    """Start nothing."""


@contextmanager
def _replaced(owner: Any, name: str, other: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, before)
