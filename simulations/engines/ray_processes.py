# SPDX-License-Identifier: Apache-2.0
"""Starts a local Ray without the processes that no run uses: the monitors of its autoscaler and of
its logs, the server of its dashboard, and the dashboard's and the runtime environments' agents.

Each is a Python of 50 to 60 MiB that takes a second of processor time to start. A raylet ends when
one of its agents ends, so another process stands in for each: it waits until the raylet closes its
input. These are the only changes of Ray's modules; a test reports when a new version of Ray needs
others.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

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
