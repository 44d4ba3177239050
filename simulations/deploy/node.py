# SPDX-License-Identifier: Apache-2.0
"""What a client's two processes do."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from pathlib import Path

from flwr.clientapp import ClientApp

from fedrec import __version__
from fedrec.errors import ClientError, FedrecError
from simulations.deploy.flower import executors
from simulations.deploy.flower import supernode as flower_supernode

_LATER = ("uvicorn.loops.auto", "uvicorn.protocols.http.auto", "uvicorn.lifespan.on", "sqlite3", "torch.optim")
"""What would be imported in every fork otherwise."""


def own_app(_identifier: str, version: str, _digest: str) -> ClientApp:
    """This installation's ClientApp, whatever the server sent: no code comes to a node over the network.

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


def import_everything() -> None:
    """Import what nodes need, once for all forks of this process."""
    import clients.app
    import clients.own_node  # noqa: F401
    from fedrec import registry

    for kind in (registry.STEP, registry.MODEL, registry.SPLIT):
        list(registry.available(kind))
    for name in _LATER:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to every page that the forks share


def supernode(arguments: list[str]) -> None:
    """Speak to the server, with the flags of `flower-supernode`."""
    flower_supernode.supernode(arguments)


def executor(arguments: list[str]) -> None:
    """Wait for messages and work on each in a fork, with the flags of `flower-superexec`."""
    _read_before()
    executors.client_executor(arguments, own_app)


def _read_before() -> None:
    """Read the node's data once, for all messages to come; what is wrong with them each message will say."""
    from clients.own_data import read_own
    from simulations.deploy.client import CATALOGUE, DATA

    if DATA in os.environ:
        with contextlib.suppress(FedrecError):
            read_own(Path(os.environ[DATA]), Path(os.environ[CATALOGUE]))
