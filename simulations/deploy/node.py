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
from fedrec.errors import ClientError, EngineError, FedrecError
from simulations.deploy.flower import executors
from simulations.deploy.flower import supernode as flower_supernode
from simulations.deploy.flower.bell import BELL, Bell

_LATER = ("uvicorn.loops.auto", "uvicorn.protocols.http.auto", "uvicorn.lifespan.on", "sqlite3", "torch.optim")
"""What would be imported in every fork otherwise."""
NODE_POLL = "FEDREC_NODE_POLL"
"""Names in the environment the most seconds between two questions of an idle node for a message. With Flower's 3 s, 200
nodes leave their SuperLink no time for anything else; with more, a first message reaches idle nodes later."""


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
    flower_supernode.supernode(arguments, longest_poll(), _bell())


def longest_poll() -> float:
    """What `NODE_POLL` says, in seconds.

    Raises:
        EngineError: it is no number, or too small.
    """
    text = os.environ.get(NODE_POLL) or str(flower_supernode.FLOWER_POLL)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not flower_supernode.FIRST_POLL <= seconds < float("inf"):
        raise EngineError(
            f"{NODE_POLL} in the environment is no time between two questions",
            expected=f"seconds, {flower_supernode.FIRST_POLL} or more",
            got=repr(text),
            fix=f"export {NODE_POLL}={flower_supernode.FLOWER_POLL:g}",
        )
    return seconds


def executor(arguments: list[str]) -> None:
    """Wait for messages and work on each in a fork, with the flags of `flower-superexec`."""
    _read_before()
    executors.client_executor(arguments, own_app, _bell())


def _bell() -> Bell:
    file = os.environ.get(BELL)
    return Bell(None if file is None else Path(file))


def _read_before() -> None:
    """Read the node's data once, for all messages to come; what is wrong with them each message will say."""
    from clients.own_data import read_own
    from simulations.deploy.client import CATALOGUE, DATA

    if DATA in os.environ:
        with contextlib.suppress(FedrecError):
            read_own(Path(os.environ[DATA]), Path(os.environ[CATALOGUE]))
