# SPDX-License-Identifier: Apache-2.0
"""The processes of a deployment: their command lines and environments, with and without Docker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedrec.errors import EngineError
from simulations.deployment.flower.unfinished import UNFINISHED
from simulations.deployment.layout import Deployment
from simulations.flower_commands import environment_with

SERVER = "simulations.deployment.processes.server"
HEALTH = "simulations.deployment.processes.health"
TASK_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
IN_CONTAINER = "FEDREC_CONTAINER"
"""Set in the environment of the image."""


@dataclass(frozen=True)
class Process:
    """A process that is started, monitored and restarted.

    Attributes:
        name: its name, also of its log.
        command: the command line.
        environment: variables in addition to the caller's environment.
        health: URL that responds when it is healthy; empty for a process without a port.
        after: file that must be there before it is started; such processes are stopped first.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str | None = None
    after: Path | None = None


def server_processes(deployment: Deployment) -> list[Process]:
    """SuperLink, executor of the ServerApp, and the gateway."""
    settings = deployment.settings
    server = deployment.server
    home = {"FLWR_HOME": str(deployment.flower_home)}
    noted = {UNFINISHED: str(server / "unfinished")}
    secret = server / "superexec.secret"
    superlink = superlink_flags(
        host="127.0.0.1",
        port=settings.superlink_port,
        certificate=server / "superlink.crt",
        key=server / "superlink.key",
        authority=deployment.authority,
        database=deployment.database,
        secret=secret,
    )
    executor = executor_flags(deployment.superlink, deployment.authority, secret)
    return [
        Process(
            "superlink",
            (*python(SERVER), "superlink", *superlink),
            home,
            f"https://{deployment.superlink}/health",
        ),
        Process(
            "serverapp",
            (*python(SERVER), "executor", *executor),
            {**home, **noted, TASK_POLL: "0.5"},
        ),
        Process("gateway", _gateway(deployment), {}, f"https://127.0.0.1:{settings.port}/health"),
    ]


def flags(**values: object) -> tuple[str, ...]:
    """Options of a command line with their values, such as `--port 8443` for `port=8443`."""
    named = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items())
    return tuple(part for pair in named for part in pair)


def superlink_flags(
    *,
    host: str,
    port: int,
    certificate: Path,
    key: Path,
    authority: Path,
    database: Path,
    secret: Path,
) -> tuple[str, ...]:
    """Flags of the SuperLink: TLS, node authentication, separate executors with a secret, and a
    persistent state."""
    return (
        *flags(host=host, port=port),
        *flags(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certfile=authority),
        "--enable-supernode-auth",
        *flags(isolation="process", database=database),
        "--disable-runtime-dependency-installation",
        *flags(superexec_auth_secret_file=secret),
    )


def executor_flags(address: str, authority: Path, secret: Path) -> tuple[str, ...]:
    """Flags of an executor, the server's or a node's."""
    return flags(
        runtime_api_address=address,
        root_certificates=authority,
        superexec_auth_secret_file=secret,
    )


def node_process(deployment: Deployment) -> list[Process]:
    """The process from which the nodes on this machine fork, if there are any."""
    if not deployment.settings.local_nodes or not deployment.numbers:
        return []
    command = (*python("simulations.cli"), "deploy", "nodes", str(deployment.path))
    return [Process("nodes", command, after=deployment.registered)]


def environment_of(process: Process) -> dict[str, str]:
    """The whole environment of a process: Flower's, with this project's packages."""
    root = str(Path(__file__).resolve().parents[3])
    search = os.pathsep.join(
        dict.fromkeys([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    ).strip(":")
    # One thread per process: many processes share a machine, and the batches of one client are too
    # small to split.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return environment_with({**threads, "PYTHONPATH": search, **process.environment})


def python(module: str) -> tuple[str, ...]:
    """The start of a command line that runs one of our modules."""
    return (sys.executable, "-m", module)


def _gateway(deployment: Deployment) -> tuple[str, ...]:
    settings = deployment.settings
    server = deployment.server
    return (
        *(*python("simulations.cli"), "deploy", "gateway"),
        *flags(host=settings.bind, port=settings.port, upstream=deployment.superlink),
        *flags(certificate=server / "gateway.crt", key=server / "gateway.key"),
        *flags(authority=deployment.authority, nodes=deployment.path / "nodes"),
    )


def refuse_root_in_a_container() -> None:
    """Refuse to run as root in a container.

    Raises:
        EngineError: this is a container, and its user is root.
    """
    if os.environ.get(IN_CONTAINER) and os.getuid() == 0:
        raise EngineError(
            "the containers of a deployment do not run as root",
            expected="the user and group that .env names beside docker-compose.yml",
            got="user 0",
            fix="fedrec deploy add-nodes DEPLOYMENT 0 writes .env; then docker compose up again",
        )
