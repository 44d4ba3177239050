# SPDX-License-Identifier: Apache-2.0
"""Starts a local Ray without the processes that no run uses: the monitors of its autoscaler and of
its logs, the server of its dashboard, and the agents of the dashboard and of runtime environments.

Each is a Python process of about 55 MiB, so with them two nodes take a quarter more memory. A
raylet ends when one of its agents ends, so another program stands in for each and waits until the
raylet closes its input. These are the only changes of Ray's modules; a test reports when a new
version of Ray needs others.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
    """A local Ray that is started in the block has no more processes than it needs: all of them if
    its workers are to run in an environment that an agent makes for them, as below `uv run`."""
    worker: Any = importlib.import_module("ray._private.worker")
    configured = worker.RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ
    if configured or worker._maybe_modify_runtime_env(None, False):
        yield
        return
    node: Any = importlib.import_module("ray._private.node").Node
    services: Any = importlib.import_module("ray._private.services")
    start = services.start_ray_process

    def started(command: list[str], kind: str, *more: Any, **named: Any) -> Any:
        if kind == "raylet":
            command = [part for part in command if part.partition("=")[0] not in _RAYLET]
            command += [f"{name}={value}" for name, value in _RAYLET.items()]
        return start(command, kind, *more, **named)

    unused = ("start_monitor", "start_log_monitor", "start_api_server")
    before = {name: getattr(node, name) for name in unused}
    for name in unused:
        setattr(node, name, lambda *_, **__: None)
    services.start_ray_process = started
    try:
        yield
    finally:
        services.start_ray_process = start
        for name, method in before.items():
            setattr(node, name, method)
