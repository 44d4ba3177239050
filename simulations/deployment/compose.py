# SPDX-License-Identifier: Apache-2.0
"""The compose file of a deployment: the same processes with the same flags, each in a container.

Networks separate the containers: `inside` joins SuperLink, executor of the ServerApp, operator and
gateway; `outside` joins the gateway and the nodes; each node's SuperNode and executor have a
network of their own, and the executor, which sees the data, no other. The gateway alone publishes a
port.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fedrec.secure.identity import CERTIFICATE, KEY, REVOKED
from simulations.deployment.flower.unfinished import UNFINISHED
from simulations.deployment.gateway.nginx import rules
from simulations.deployment.processes.commands import (
    SERVER,
    TASK_POLL,
    executor_flags,
    flags,
    superlink_flags,
)

IMAGE = "fedrec:0.1.0"
NGINX = "nginxinc/nginx-unprivileged:1.27.3-alpine3.20"
# the owner of the deployment folder, whose keys have mode 0600
_USER = "${FEDREC_UID:-10001}:${FEDREC_GID:-10001}"
_USER_OPTIONS = "uid=${FEDREC_UID:-10001},gid=${FEDREC_GID:-10001}"
ELSEWHERE = "${FEDREC_DEPLOYMENT:?run fedrec deploy compose}"
"""The deployment folder for a compose file that lies in another one."""
ANY_BIND = "${FEDREC_BIND:-127.0.0.1}"
"""The address for a compose file that no deployment has written."""
# a process that needs more is ended and started again, and the machine's others are not
_MEMORY = "${FEDREC_MEMORY:-4g}"
_SMALL = "1g"
_SECRETS = Path("/run/secrets")
_SERVER_FILES = (
    "server/superlink.crt",
    "server/superlink.key",
    "server/gateway.crt",
    "server/gateway.key",
    "server/superexec.secret",
)
_STATE = Path("/var/lib/fedrec/state")
_RUNS = "/var/lib/fedrec/runs"
_DATA = Path("/data/data.csv")
_ASK_NGINX = "CMD wget -q --no-check-certificate -O /dev/null https://127.0.0.1:8443/health"
_HEALTH = {"interval": "10s", "timeout": "10s", "retries": 6, "start_period": "60s"}


def compose(
    nodes: int,
    *,
    bind: str = ANY_BIND,
    port: int = 8443,
    build: str = ".",
    deployment: str = ELSEWHERE,
    revoked: Sequence[int] = (),
) -> str:
    """The compose file as YAML text.

    Args:
        nodes: number of nodes that run in this file; each with its own folder `nodes/node-N`.
        bind: address of the host on which the gateway's port is published.
        port: port of the gateway on the host.
        build: folder of the Dockerfile.
        deployment: the deployment folder on the host.
        revoked: numbers of the nodes that have no containers.
    """
    numbers = [number for number in range(1, nodes + 1) if number not in revoked]
    services = {
        "superlink": _superlink(build),
        "serverapp": _serverapp(),
        "gateway": _gateway(_in_ports(bind), port, deployment),
        "operator": _operator(deployment),
    }
    networks: dict[str, Any] = {"inside": {"internal": True}, "outside": {}}
    volumes: dict[str, Any] = {"superlink-state": {}, "runs": {}}
    secrets = {
        Path(file).name: {"file": f"{deployment}/{file}"} for file in ("ca.crt", *_SERVER_FILES)
    }
    for number in numbers:
        services |= _node(number, deployment)
        networks[f"node-{number}"] = {"internal": True}
        volumes |= {f"node-{number}-state": {}, f"node-{number}-meeting": {}}
        for file in ("node.key", KEY):
            secrets[f"node-{number}-{file}"] = {"file": f"{deployment}/nodes/node-{number}/{file}"}
    table = {
        "services": services,
        "networks": networks,
        "volumes": volumes,
        "secrets": secrets,
    }
    return _HEADER + yaml.safe_dump(table, sort_keys=False, width=110)


_HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# A federation of real clients: SuperLink, executor of the ServerApp, gateway, and nodes with their
# executors.
#
#   fedrec deploy init DEPLOYMENT --host YOUR.HOST --bind 0.0.0.0 --experiment EXPERIMENT
#   cd DEPLOYMENT
#   docker compose up --detach --build
#   docker compose run --rm operator deploy register /deployment
#   docker compose run --rm operator deploy run /deployment EXPERIMENT
#
# Written by `fedrec deploy init`, with a `.env` that names the containers' user. The copy at the
# top of the project is for two nodes; `fedrec deploy compose DEPLOYMENT --into .` writes a `.env`
# for it. FEDREC_BIND is the address on which it publishes the gateway; default: loopback.
# FEDREC_MEMORY is the most memory of a container; default: 4g.
"""


def gateway_rules() -> str:
    """The gateway's rules in its container."""
    return rules(
        listen="0.0.0.0:8443",
        upstream="superlink:8000",
        name="superlink",
        certificate=_SECRETS / "gateway.crt",
        key=_SECRETS / "gateway.key",
        authority=_SECRETS / "ca.crt",
        scratch=Path("/tmp"),
    )


def _ours(**settings: Any) -> dict[str, Any]:
    """Common settings of all containers: not root, only volumes writable, no privileges, bounded
    memory, restarted when they end."""
    return {
        "image": IMAGE,
        "user": _USER,
        "read_only": True,
        "tmpfs": [_own("/tmp"), _own("/home/fedrec")],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "mem_limit": _MEMORY,
        "init": True,
        # A killed node is refused until its last heartbeat has timed out, and exits each time: no
        # limit of restarts.
        "restart": "unless-stopped",
        **settings,
    }


def _own(folder: str) -> str:
    """A tmpfs folder owned by the container's user; without these options root owns it."""
    return f"{folder}:mode=0700,{_USER_OPTIONS}"


def _checked(*arguments: str) -> dict[str, Any]:
    """The health check of a container."""
    return {
        "test": ["CMD", "python", "-m", "simulations.deployment.processes.health", *arguments],
        **_HEALTH,
    }


def _superlink(build: str) -> dict[str, Any]:
    command = superlink_flags(
        host="0.0.0.0",
        port=8000,
        certificate=_SECRETS / "superlink.crt",
        key=_SECRETS / "superlink.key",
        authority=_SECRETS / "ca.crt",
        database=_STATE / "superlink.db",
        secret=_SECRETS / "superexec.secret",
    )
    return _ours(
        build=build,
        entrypoint=["python", "-m", SERVER, "superlink"],
        command=[*command],
        networks=["inside"],
        secrets=["ca.crt", "superlink.crt", "superlink.key", "superexec.secret"],
        volumes=[f"superlink-state:{_STATE}"],
        healthcheck=_checked("answers", "https://superlink:8000/health", str(_SECRETS / "ca.crt")),
    )


def _serverapp() -> dict[str, Any]:
    return _ours(
        entrypoint=["python", "-m", SERVER, "executor"],
        command=[
            *executor_flags("superlink:8000", _SECRETS / "ca.crt", _SECRETS / "superexec.secret")
        ],
        environment={TASK_POLL: "0.5", UNFINISHED: f"{_RUNS}/.unfinished"},
        networks=["inside"],
        secrets=["ca.crt", "superexec.secret"],
        volumes=[f"runs:{_RUNS}"],
        depends_on={"superlink": {"condition": "service_healthy"}},
        healthcheck=_checked("answers", "https://superlink:8000/health", str(_SECRETS / "ca.crt")),
    )


def _in_ports(bind: str) -> str:
    """An address as `ports` has it: IPv6 in brackets."""
    return bind if bind == ANY_BIND or ":" not in bind else f"[{bind}]"


def _gateway(bind: str, port: int, deployment: str) -> dict[str, Any]:
    return {
        "image": NGINX,
        "user": _USER,
        "read_only": True,
        "tmpfs": [_own("/tmp")],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "mem_limit": _SMALL,
        "restart": "unless-stopped",
        "command": ["nginx", "-e", "stderr", "-c", "/etc/nginx/gateway.conf"],
        "networks": ["inside", "outside"],
        "ports": [f"{bind}:{port}:8443"],
        "secrets": ["ca.crt", "gateway.crt", "gateway.key"],
        "volumes": [f"{deployment}/server/nginx-compose.conf:/etc/nginx/gateway.conf:ro"],
        "depends_on": {"superlink": {"condition": "service_healthy"}},
        "healthcheck": {"test": _ASK_NGINX.split(), **_HEALTH},
    }


def _operator(deployment: str) -> dict[str, Any]:
    """Commands of the operator: `docker compose run --rm operator deploy ...`."""
    return _ours(
        profiles=["operator"],
        restart="no",
        environment={"FEDREC_SUPERLINK": "superlink:8000", "FEDREC_RUNS": _RUNS},
        networks=["inside"],
        volumes=[f"{deployment}:/deployment:ro", f"runs:{_RUNS}"],
    )


def _node(number: int, deployment: str) -> dict[str, dict[str, Any]]:
    """A node's two containers: one reaches the gateway and not the data, the other the data and not
    the gateway."""
    name = f"node-{number}"
    folder = f"{deployment}/nodes/node-{number}"
    meeting = f"{name}-meeting:{_STATE / 'meeting'}"
    joined = [
        f"{folder}/{file}:/join/{file}:ro" for file in ("ca.crt", "node.toml", "catalogue.json")
    ]
    command = ["client", *flags(join="/join", superlink="gateway:8443", state=_STATE, data=_DATA)]
    command += flags(host=f"meeting-{number}", bind="0.0.0.0", port=9094)
    alive = _checked("alive", str(_STATE / "logs"))
    supernode = _ours(
        mem_limit=_SMALL,
        command=[*command, "--part", "supernode"],
        networks={"outside": {}, name: {"aliases": [f"meeting-{number}"]}},
        secrets=[{"source": f"{name}-node.key", "target": "/join/node.key"}],
        volumes=[meeting, *joined],
        depends_on={"gateway": {"condition": "service_healthy"}},
        healthcheck=alive,
    )
    supernode["tmpfs"] = [*supernode["tmpfs"], _own(str(_STATE))]
    executor = _ours(
        command=[*command, "--part", "executor"],
        networks=[name],
        # native code is compiled once, not at each start
        environment={"FEDREC_CACHE": str(_STATE / "cache")},
        secrets=[{"source": f"{name}-{KEY}", "target": f"/join/{KEY}"}],
        volumes=[
            f"{name}-state:{_STATE}",
            meeting,
            *joined,
            f"{folder}/{CERTIFICATE}:/join/{CERTIFICATE}:ro",
            f"{deployment}/{REVOKED}:/join/{REVOKED}:ro",
            f"{folder}/data.csv:{_DATA}:ro",
        ],
        depends_on={f"supernode-{number}": {"condition": "service_started"}},
        healthcheck=alive,
    )
    return {f"supernode-{number}": supernode, f"clientapp-{number}": executor}
