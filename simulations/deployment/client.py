# SPDX-License-Identifier: Apache-2.0
"""A real client: a SuperNode that connects to the server, and an executor that works on its own
data.

They are two processes, so that the process with a network connection never opens the data. They
communicate over TLS on loopback, with a certificate and a secret that are created on the node and
never leave it.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from clients.device.own_data import read_own
from clients.device.policy import Policy
from fedrec.components.sections import override
from fedrec.errors import EngineError, RunError, missing_file
from fedrec.runtime.files import read_toml
from simulations.deployment.layout import (
    CATALOGUE,
    DATA,
    RENEWED_DAYS,
    Authority,
    check_path,
    days_left,
    new_secret,
    private_folder,
    write_private,
)
from simulations.deployment.processes import (
    Process,
    Supervisor,
    check_container_user,
    executor_flags,
    flags,
)

NODE_PATIENCE = 6.0
"""Seconds after which processes of a node that do not stop are killed."""


class ClientPlan:
    """A client's join folder and its owner's settings.

    Args:
        join: folder from the operator: `node.key`, `ca.crt`, `catalogue.json`.
        superlink: HOST:PORT of the deployment's gateway.
        data: CSV file of the hosted users, which a SuperNode alone does not need; default:
            `data.csv` in the folder.
        state: folder of the private state: private parameters, spent budgets, logs; default:
            `state` in the folder.
        host: address at which the executor reaches the SuperNode.
        bind: address that the SuperNode listens on for it; default: the same.
        port: port of this connection.
        settings: such as `most-rounds=100`, in addition to those in the folder's `node.toml`.

    Attributes:
        catalogue: path of the operator's catalogue.
        meeting: folder of the certificate and the secret of SuperNode and executor.
        config: the settings, for Flower's node configuration.
    """

    def __init__(
        self,
        join: Path,
        superlink: str,
        *,
        data: Path | None = None,
        state: Path | None = None,
        host: str = "127.0.0.1",
        bind: str | None = None,
        port: int = 9094,
        settings: Sequence[str] = (),
    ) -> None:
        self.join = join.expanduser().resolve()
        self.superlink = superlink
        self.data = (data or self.join / "data.csv").expanduser().resolve()
        self.catalogue = self.join / "catalogue.json"
        self.state = (state or self.join / "state").expanduser().resolve()
        self.meeting = self.state / "meeting"
        self.host = host
        self.bind = bind or host
        self.port = port
        file = self.join / "node.toml"
        self.config = read_toml(file, RunError) if file.is_file() else {}
        for text in settings:
            self.config = override(self.config, text)

    def check(self, part: str = "all") -> None:
        """Check the settings, and read the data as the node will, so that errors are found before
        it connects; the SuperNode needs no data, and the executor no key.

        Raises:
            EngineError: a file in the join folder is missing, or other users can read its key.
            ExperimentError: a setting is unknown, or its value is wrong.
            DataError: the data or the catalogue are missing, or do not match.
        """
        for path in (self.join, self.state, self.data):
            check_path(path)  # they are part of Flower's node configuration
        if part != "executor":
            _check_keys(self.join)
        Policy.parse(self.config, at="node")
        if part != "supernode":
            self.check_data()

    def check_data(self) -> None:
        """Read the data as the node will.

        Raises:
            DataError: see `check`.
        """
        if not self.data.is_file():
            raise missing_file("the data file", self.data, "give --data FILE")
        if not self.catalogue.is_file():
            fix = "ask the operator for it; fedrec deploy add-nodes DEPLOYMENT 0 writes it"
            raise missing_file("the catalogue", self.catalogue, fix)
        read_own(self.data, self.catalogue)

    def node_config(self) -> str:
        """Flower's node configuration, which the SuperNode sends only to the executor."""
        files = {"data": self.data, "catalogue": self.catalogue, "join": self.join}
        named = {name: str(file) for name, file in {"private-dir": self.state, **files}.items()}
        table = {**self.config, **named}
        return " ".join(f"{name}={json.dumps(value)}" for name, value in table.items())


def _check_keys(join: Path) -> None:
    """Check that a join folder has a valid certificate and a key that only its owner can read."""
    key = join / "node.key"
    authority = join / "ca.crt"
    if not (key.is_file() and authority.is_file()):
        raise EngineError(
            f"{join} is not a node's folder: node.key or ca.crt is missing",
            fix="ask the operator for this node's folder",
        )
    if days_left(authority.read_bytes()) <= 0:
        raise EngineError(
            f"Certificate {authority} has expired, by this machine's clock",
            fix="set the clock, or ask the operator for the folder of a new deployment",
        )
    if key.stat().st_mode & 0o077:
        raise EngineError(f"other users can read {key}", fix=f"chmod 600 {key}")


def prepare(plan: ClientPlan, part: str = "all") -> None:
    """Check a client, and create the certificate and the secret of SuperNode and executor if they
    are missing or expire soon; an executor alone waits for them.

    Raises:
        EngineError, DataError: see `ClientPlan.check`.
    """
    plan.check(part)
    meeting = plan.meeting
    secret = meeting / "node.secret"
    while part == "executor" and not secret.exists():
        time.sleep(0.2)
    if not meeting.exists():
        private_folder(private_folder(plan.state) / meeting.name)
    if not secret.exists() or days_left((meeting / "node.crt").read_bytes()) <= RENEWED_DAYS:
        authority = Authority.create("fedrec node")
        issued = authority.issue(plan.host, [plan.host, "localhost", "127.0.0.1"])
        write_private(meeting / "ca.crt", authority.issued.certificate)  # its key is not stored
        write_private(meeting / "node.crt", issued.certificate)
        write_private(meeting / "node.key", issued.key)
        write_private(secret, new_secret())


def _supernode_flags(plan: ClientPlan) -> tuple[str, ...]:
    """Flags of the SuperNode for TLS, its key and a separate executor."""
    meeting = plan.meeting
    return flags(
        superlink=plan.superlink,
        root_certificates=plan.join / "ca.crt",
        auth_supernode_private_key=plan.join / "node.key",
        isolation="process",
        host=plan.bind,
        port=plan.port,
        ssl_certfile=meeting / "node.crt",
        ssl_keyfile=meeting / "node.key",
        ssl_ca_certfile=meeting / "ca.crt",
        superexec_auth_secret_file=meeting / "node.secret",
        node_config=plan.node_config(),
    )


def client_processes(plan: ClientPlan) -> list[Process]:
    """Processes of the SuperNode and the executor."""
    home = {"FLWR_HOME": str(plan.state / "flwr")}
    meeting = plan.meeting
    executor = executor_flags(
        f"{plan.host}:{plan.port}", meeting / "ca.crt", meeting / "node.secret"
    )
    data = {DATA: str(plan.data), CATALOGUE: str(plan.catalogue)}
    return [
        Process("supernode", ("supernode", *_supernode_flags(plan)), home),
        Process("executor", ("executor", *executor), {**home, **data}),
    ]


def run_client(plan: ClientPlan, part: str = "all") -> None:
    """Run a client, or one of its two processes, until a stop signal.

    Raises:
        EngineError, DataError: see `ClientPlan.check`.
    """
    check_container_user()
    prepare(plan, part)
    run_nodes(
        [process for process in client_processes(plan) if part in ("all", process.name)],
        plan.state / "logs",
    )


def run_nodes(processes: Sequence[Process], folder: Path) -> None:
    """Run processes of nodes, as forks of this one, until a stop signal."""
    from simulations.deployment.supernode import executor, import_everything, supernode

    import_everything(trains=any(process.command[0] == "executor" for process in processes))
    mains = {"supernode": supernode, "executor": executor}
    Supervisor(processes, folder, NODE_PATIENCE, mains).run()
