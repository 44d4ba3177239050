# SPDX-License-Identifier: Apache-2.0
"""The folder of a deployment: its settings and paths."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Self

import tomli_w
from pydantic import Field, field_validator, model_validator

from fedrec.config import Config
from fedrec.errors import RunError
from fedrec.runtime.files import read_toml, write_atomically
from fedrec.secure.identity import REVOKED

SETTINGS = "deployment.toml"
DATA = "FEDREC_NODE_DATA"
CATALOGUE = "FEDREC_NODE_CATALOGUE"
"""Environment variables with the files that a client's executor reads before the first message."""
REVOKED_KEY = "node.pub.revoked"
"""Public key of a revoked node, in its folder; the gateway reads `node.pub` only."""
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_LAST_PORT = 65535
_STRANGE = set("\"'`{};$\\\n\r")


class DeploymentConfig(Config):
    """Settings of a deployment, in `deployment.toml`."""

    hosts: tuple[str, ...] = Field(default=("localhost", "127.0.0.1"), min_length=1)
    """Names and addresses at which clients reach this machine; the first one is written into their
    files."""
    bind: str = "127.0.0.1"
    """Address that the gateway listens on; 0.0.0.0 for all."""
    port: int = Field(default=8443, ge=1, le=_LAST_PORT)
    """Port of the gateway, the only port that clients can reach."""
    superlink_port: int = Field(default=18000, ge=1, le=_LAST_PORT)
    """Port of the SuperLink on 127.0.0.1. Anyone who reaches it can start runs: never publish
    it."""
    node_port: int = Field(default=19100, ge=1, le=_LAST_PORT)
    """First port on 127.0.0.1 of the nodes on this machine, which take one port each."""
    nodes: int = Field(default=2, ge=0, le=4096)
    """Number of nodes with keys, revoked ones included."""
    revoked: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of nodes whose keys were revoked (`fedrec deploy revoke`)."""
    most_clients: int | None = Field(default=None, ge=1)
    """Largest number of clients per node; a node that announces more is not admitted. Required for
    runs with noise, because the computed noise decreases with the number of clients. `init
    --experiment` writes the size of the largest shard."""
    local_nodes: bool = True
    """Whether `up` also starts the nodes on this machine."""

    @field_validator("hosts", "bind", mode="after")
    @classmethod
    def _hosts_that_can_be(cls, value: tuple[str, ...] | str) -> tuple[str, ...] | str:
        for host in (value,) if isinstance(value, str) else value:
            if not _is_host(host):
                raise ValueError(
                    "use IP addresses or names of letters, digits, '-' and '.' (others as xn--...)"
                )
        return value

    @model_validator(mode="after")
    def _ports_that_differ(self) -> Self:
        ports = [self.port, self.superlink_port]
        local = range(self.node_port, self.node_port + self.nodes) if self.local_nodes else ()
        if len(set(ports)) < len(ports) or any(port in local for port in ports):
            raise ValueError(
                "use three different ports outside those of nodes (one per node from node-port on)"
            )
        if local and local[-1] > _LAST_PORT:
            raise ValueError(
                f"ports of nodes must not exceed {_LAST_PORT} (one per node from node-port on)"
            )
        return self


def check_path(path: Path) -> None:
    """Check that a path has no characters that files and command lines of other programs forbid.

    Raises:
        RunError: the path has quotes, braces or similar characters.
    """
    strange = sorted(set(str(path)) & _STRANGE)
    if strange or not str(path).isprintable():
        raise RunError(
            f"invalid path {str(path)!r} for a deployment",
            got=" ".join(strange) or "a character that cannot be printed",
            fix="choose a folder without quotes, braces, semicolons, dollars and backslashes",
        )


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        # a name that ends in a number is an invalid address, such as 999.1.1.1
        ends_in_number = text.rpartition(".")[2].isdecimal()
        return len(text) <= 253 and _HOST.fullmatch(text) is not None and not ends_in_number
    return True


class Deployment:
    """A deployment folder.

    Args:
        path: the folder.

    Attributes:
        authority: public certificate of the authority.
        authority_key: its private key, used to sign certificates and never by a running process.
        server: folder of the files of the server's processes.
        logs: folder of the processes' output.
        database: the SuperLink's state.
        revoked: file with the names of revoked nodes, for all others.
        registered: a file that exists after the nodes' keys were registered.
        flower_home: Flower's home for the operator's commands and the server's processes.
        settings: from `deployment.toml`.

    Raises:
        RunError: the folder is not a deployment.
    """

    def __init__(self, path: Path) -> None:
        got = "no such file"
        try:
            self.path = path.expanduser().resolve()
            file = self.path / SETTINGS
            exists = file.is_file()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, no such home
            exists = False
            got = getattr(error, "strerror", None) or str(error)
        if not exists:
            raise RunError(
                f"{str(path)[:200]} is not a deployment: {SETTINGS}",
                got=got,
                fix="create one with fedrec deploy init FOLDER",
            )
        self.authority = self.path / "ca.crt"
        self.authority_key = self.path / "authority" / "ca.key"
        self.server = self.path / "server"
        self.logs = self.path / "logs"
        self.database = self.server / "superlink.db"
        self.revoked = self.path / REVOKED
        self.registered = self.server / "registered"
        self.flower_home = self.server / "flwr"
        self.settings = DeploymentConfig.parse(read_toml(file, RunError), at="deployment")

    @classmethod
    def create(cls, path: Path, settings: DeploymentConfig) -> Deployment:
        """Create the folder with only its settings."""
        write_atomically(path.expanduser().resolve() / SETTINGS, tomli_w.dumps(settings.table()))
        return cls(path)

    def changed(self, **settings: object) -> Deployment:
        """Save changed settings, and return the changed deployment."""
        return self.create(self.path, self.settings.model_copy(update=settings))

    @property
    def superlink(self) -> str:
        """HOST:PORT of the SuperLink, on this machine only; in a container, from
        `FEDREC_SUPERLINK`."""
        return os.environ.get("FEDREC_SUPERLINK") or f"127.0.0.1:{self.settings.superlink_port}"

    @property
    def gateway(self) -> str:
        """HOST:PORT that clients connect to."""
        return f"{self.settings.hosts[0]}:{self.settings.port}"

    def node(self, number: int) -> Path:
        """Folder of a node; numbers start at 1."""
        return self.path / "nodes" / f"node-{number}"

    @property
    def numbers(self) -> list[int]:
        """Numbers of all nodes that are not revoked, in order."""
        every = range(1, self.settings.nodes + 1)
        return [number for number in every if number not in self.settings.revoked]

    def node_folders(self) -> list[Path]:
        """Folders of all nodes that are not revoked, in order."""
        return [self.node(number) for number in self.numbers]
