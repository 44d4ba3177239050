# SPDX-License-Identifier: Apache-2.0
"""The SuperNode: shorter waits, faster heartbeats, and one reply to every message."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
from flwr.supernode.nodestate import nodestate_factory
from uvicorn import Server

from fedrec.runtime.backoff import Backoff
from simulations import flower_commands
from simulations.deployment.flower.patches import direct_middleware, heartbeats, pieces
from simulations.deployment.flower.patches.node_state import AnsweringState
from simulations.deployment.flower.patches.pace import PacedTime, ticking
from simulations.deployment.flower.patches.pieces import PackedPieces
from simulations.deployment.flower.work_signal import WorkSignal

FLOWER_POLL = 3.0
"""Seconds that Flower's SuperNode sleeps between two polls; shorter sleeps wait for a reply."""
FIRST_POLL = 0.1
"""Seconds after a message until the SuperNode polls for the next one."""
HELD_LONG = 5.0
"""Seconds after which an empty reply counts as held by the SuperLink."""
FIRST_LOOK = 0.03
LONGEST_LOOK = 0.5
"""Seconds between two checks for the reply to a message (Flower: .5)."""
KEPT = 60.0
"""Seconds that an unused connection to the server is kept; the gateway ends it after 75."""
REFUSED = 77
"""Exit status of a SuperNode whose key the server does not accept."""


class NodePace:
    """Sleep times of the SuperNode: short after a message and growing while idle; likewise while it
    waits for a reply.

    A poll that took long was held by the SuperLink, so the next poll follows at once.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._message = Backoff(FIRST_POLL, FLOWER_POLL, growth=1.3)
        self._reply = Backoff(FIRST_LOOK, LONGEST_LOOK)
        self._clock = clock
        self._asked = clock()

    def __call__(self, seconds: float) -> float:
        """Seconds to sleep instead of Flower's."""
        if seconds < FLOWER_POLL:  # it waits for the reply to a message, so it is not idle
            self._message.restart()
            return min(seconds, self._reply.next())
        self._reply.restart()
        if self._clock() - self._asked > HELD_LONG:
            self._message.restart()
        pause = self._message.next()
        self._asked = self._clock() + pause
        return pause


class SuperNodeState(PackedPieces, AnsweringState):
    """Flower's state of a SuperNode with all patches."""


def load() -> Any:
    """Import all parts of Flower's SuperNode and patch them; its main loop. Before forks, so that
    they need not."""
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    importlib.import_module("flwr.supernode.main")  # otherwise imported by each SuperNode
    flower_commands.load("flower-supernode")
    pieces.use(loop)
    return loop


def supernode(arguments: list[str], work_signal: WorkSignal) -> None:
    """`flower-supernode` with shorter waits, faster heartbeats, and a reply to every message. If
    the server does not accept the node's key, the process ends with the status `REFUSED`.

    Args:
        arguments: of `flower-supernode`.
        work_signal: sent to the executor.
    """
    load().time = PacedTime(NodePace())
    keep_connections()
    direct_middleware.use()
    heartbeats.use_in_supernode()
    Server.main_loop = ticking
    nodestate_factory.InMemoryNodeState = partial(SuperNodeState, work_signal=work_signal)  # type: ignore[misc]
    ending_as_refused(partial(flower_commands.run, "flower-supernode", arguments))


def keep_connections() -> None:
    """Keep the connections that this process opens from one heartbeat to the next: httpx would
    close them after 5 s, and each heartbeat would begin with a TLS handshake."""
    limits = httpx.Limits(max_keepalive_connections=2, keepalive_expiry=KEPT)
    httpx.Client = partial(httpx.Client, limits=limits)  # type: ignore[misc]


def ending_as_refused(connect: Callable[[], None]) -> None:
    """Run a SuperNode; its process ends with the status `REFUSED` if Flower ended it because of an
    answer 401, 403 or the like, and otherwise as by Flower."""
    try:
        connect()
    except BaseException as end:
        error: BaseException | None = end
        while error is not None and not isinstance(error, httpx.HTTPStatusError):
            error = error.__context__
        if error is not None and 400 <= error.response.status_code < 500:
            print(f"the server does not accept this node's key: {error}", file=sys.stderr)
            sys.exit(REFUSED)
        raise
