# SPDX-License-Identifier: Apache-2.0
"""The SuperLink: Flower's, with the patches for its state and its web server."""

from __future__ import annotations

import gc
import resource
from typing import Any

from flwr.server.superlink.linkstate import linkstate_factory
from sqlalchemy import event
from sqlalchemy.pool import Pool

from simulations import flower_commands
from simulations.deployment.flower.patches import direct_middleware, heartbeats, idle_polls
from simulations.deployment.flower.patches.heartbeats import NodeHeartbeats
from simulations.deployment.flower.patches.idle_polls import IdleNodes
from simulations.deployment.flower.patches.old_messages import OldMessages
from simulations.deployment.flower.patches.pieces import PackedPieces
from simulations.deployment.flower.patches.rare_writes import RareWrites

DATABASE_WAIT_MS = 60_000
"""Milliseconds that the SuperLink waits for a lock on its database (Flower: 5,000)."""


class SuperLinkState(PackedPieces, NodeHeartbeats, IdleNodes, OldMessages, RareWrites):
    """Flower's state of a SuperLink with all patches."""


def wait_for_database() -> None:
    """Let all connections of this process to a database wait longer for its lock: those of the
    SuperLink's state, and those of its pieces."""
    event.listen(Pool, "checkout", _wait_longer)


def _wait_longer(connection: Any, *_: object) -> None:
    connection.execute(f"PRAGMA busy_timeout = {DATABASE_WAIT_MS}")


def superlink(arguments: list[str]) -> None:
    """`flower-superlink` with all patches, as many open files as it may have, and less garbage
    collection."""
    flower_commands.load("flower-superlink")
    direct_middleware.use()
    heartbeats.use_in_superlink()
    idle_polls.use()
    wait_for_database()
    linkstate_factory.SqlLinkState = SuperLinkState  # type: ignore[misc]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each waiting node
    gc.collect()
    # excludes the modules imported so far, a seventh of the work; each collection goes over objects
    # of the web framework and SQLAlchemy
    gc.freeze()
    flower_commands.run("flower-superlink", arguments)
