# SPDX-License-Identifier: Apache-2.0
"""Entry points of a deployment's processes: a client's SuperNode and executor, forks of nodes, and
the server's programs."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pkgutil
import sys
from pathlib import Path

from flwr.clientapp import ClientApp

from fedrec import __version__
from fedrec.errors import ClientError, EngineError, FedrecError
from fedrec.training.kernel import compile_ahead
from simulations import flower_commands
from simulations.deployment import flower
from simulations.deployment.processes import check_container_user
from simulations.flower_commands import disable_telemetry

# Nodes as forks of one process that has imported everything.
#
# Importing Flower and torch takes seconds of a core and 250 MiB for each of a node's two processes.
# Forks share both (memory is copy-on-write), so a machine can run many more nodes. Nodes are as
# isolated from each other as two programs of one user.

_LATER = (
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.lifespan.on",
    "sqlite3",
    "torch.optim",
    "fedrec.privacy.plan",
)
"""Modules imported before forking."""


def own_app(_identifier: str, version: str, _digest: str) -> ClientApp:
    """Return this installation's ClientApp; a node never runs the server's code.

    Raises:
        ClientError: the server runs another version of fedrec.
    """
    from clients.app import app

    if __version__ not in (version, "0+unknown"):
        raise ClientError(
            "server and node run different versions of fedrec",
            expected=f"fedrec {__version__}, as on this node",
            got=f"fedrec {version}",
            fix="install the same version on both",
        )
    return app


def import_everything(*, trains: bool = True) -> None:
    """Import all modules and load the compiled code, once for all forks of this process; in a fork
    this would take a second of a core per message. It takes about 15 s if the code was never
    compiled on this machine.

    Args:
        trains: whether forks train; a SuperNode alone needs no compiled code.
    """
    import clients.app
    import clients.device.node  # noqa: F401
    from fedrec.components import registry

    for kind in (registry.STEP, registry.MODEL, registry.SPLIT):
        list(registry.available(kind))
    for name in (*_LATER, *_names_in("strategies")):
        importlib.import_module(name)
    for name in ("flower-superexec", flower.CLIENT_APP):
        flower_commands.load(name)
    flower.load()
    if trains:
        compile_ahead("train_clients")
    flower.freeze()


def _names_in(package: str) -> list[str]:
    """Names of the modules in one of our packages."""
    paths = importlib.import_module(package).__path__
    return [module.name for module in pkgutil.walk_packages(paths, f"{package}.")]


def executor(arguments: list[str]) -> None:
    """Wait for messages and work on each in a fork, with the flags of `flower-superexec`."""
    _log_to_standard_error()
    _read_before()
    flower.client_executor(arguments, own_app)


def _log_to_standard_error() -> None:
    """Write fedrec's warnings and errors to standard error, which is the node's log: Flower writes
    only its own."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("fedrec")
    logger.handlers[:] = [handler]
    logger.disabled = logger.propagate = False


def _read_before() -> None:
    """Read the node's data once for all messages; data errors are raised by each message."""
    from clients.device.own_data import read_own
    from simulations.deployment.layout import CATALOGUE, DATA

    if DATA in os.environ:
        with contextlib.suppress(FedrecError):
            read_own(Path(os.environ[DATA]), Path(os.environ[CATALOGUE]))


# Main program of the server's processes: `superlink` or `executor`, with the flags of Flower's
# programs.

_LARGE = ("torch", "pandas")
"""Modules that every ServerApp imports, besides the packages of its app bundle."""


def main() -> None:
    """Run the part that the first argument names."""
    disable_telemetry(os.environ)
    try:
        check_container_user()
    except EngineError as error:
        sys.exit(f"error: {error.text()}")
    part, *arguments = sys.argv[1:]
    if part == "superlink":
        flower.superlink(arguments)
        return
    for name in _LARGE:
        importlib.import_module(name)
    flower.freeze()
    flower.server_executor(arguments)


if __name__ == "__main__":
    main()
