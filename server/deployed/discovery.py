# SPDX-License-Identifier: Apache-2.0
"""Discovery of real nodes, which join and leave, and of the clients that they host.

Before each round the server looks for new nodes and asks them which clients they host; these may be
sampled from that round on. The reply is stored under the node's Flower id, which belongs to its
registered key, and written into the run folder. Nodes are never removed: clients of an offline node
are drawn like all others and count as missing, so that the sampling probability does not depend on
which nodes are online.

A client id belongs to the node that announced it first. An id announced by two nodes at the same
time belongs to neither.

Initial parameters are requested from a few nodes; they are a function of the experiment, so honest
nodes return the same bits, up to rounding differences between machines.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedrec.errors import ClientError, EngineError
from fedrec.protocol.messages import HELLO, INITIAL, Presence, read_arrays, unpack_presence
from fedrec.runtime.files import open_atomically
from fedrec.runtime.process import Backoff
from server.checkpoint import reading
from server.nodes import Roster, is_refusal, reason_of

log = logging.getLogger("fedrec")
MOST_CLIENTS = 1_000_000
"""Largest number of clients per node, unless the deployment sets a smaller one."""
_ASK_AGAIN = 3  # polls before a node without a valid reply is asked again
_LONGEST = 500  # characters of an error text about a node
_NAMED = 5  # nodes in an error
ASKED = 5
"""Number of nodes asked for initial parameters."""


def _read_roster(file: Path) -> dict[int, Presence]:
    """Read the nodes that a run has seen and their announced clients, by Flower's id, in the order
    in which they joined; empty without a file.

    Raises:
        RunError: the file is damaged.
    """
    if not file.exists():
        return {}
    expected = "nodes and their clients, as written by fedrec"
    fix = "restore it from a backup, or delete it: the nodes are asked again"
    with reading(file, expected, fix), np.load(file, allow_pickle=False) as arrays:
        nodes = dict.fromkeys(name.partition("/")[0] for name in arrays)
        return {
            int(node): _hosted(arrays[f"{node}/training"], arrays[f"{node}/evaluated"])
            for node in nodes
        }


def _write_roster(file: Path, nodes: Mapping[int, Presence]) -> None:
    """Write the roster for `_read_roster`, readable by its owner only."""
    arrays = {
        f"{node}/{name}": getattr(presence, name)
        for node, presence in nodes.items()
        for name in ("training", "evaluated")
    }
    with open_atomically(file, mode=0o600) as opened:
        np.savez(opened, allow_pickle=False, **arrays)


@dataclass
class _Trouble:
    """Why a node has not joined, and the number of polls without it."""

    reason: str = "did not announce its clients"
    refused: bool = False
    pause: int = _ASK_AGAIN


class Discovery:
    """Roster of a federation whose nodes join and leave.

    Args:
        grid: connection to the nodes.
        file: file of the roster; read first, if it exists.
        timeout: seconds that a node has to reply.
        most: clients that a node may host; a node that announces more is ignored.
        sleep: function that waits.

    Raises:
        RunError: the file is not a valid roster.
    """

    def __init__(
        self,
        grid: Grid,
        file: Path,
        *,
        timeout: float,
        most: int = MOST_CLIENTS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid = grid
        self.timeout = timeout
        self.most = most
        self._sleep = sleep
        self._file = file
        self._known = _read_roster(file)
        self._trouble: dict[int, _Trouble] = {}  # of each node that has not joined

    @property
    def roster(self) -> Roster:
        """All nodes seen so far, ordered by id."""
        nodes = tuple(sorted(self._known))
        return Roster(nodes, tuple(self._known[node] for node in nodes))

    def wait_for(self, nodes: int) -> Roster:
        """Wait until `nodes` nodes have joined, and return the roster.

        Raises:
            EngineError: they did not join before the timeout.
        """
        pauses = Backoff(0.2, 2.0, growth=2.0)
        waited = 0.0
        while True:
            self.refresh_roster()
            if len(self._known) >= nodes and len(self.roster.training):
                return self.roster
            self._check_refusals(nodes)
            if waited >= self.timeout:
                raise EngineError(
                    "too few nodes with clients joined",
                    expected=f"at least {nodes} within {self.timeout:g} s",
                    got=self._joined_and_not(),
                    fix="start nodes, fix those that failed, or lower engine.nodes",
                )
            pause = pauses.next()
            self._sleep(pause)
            waited += pause

    def _check_refusals(self, nodes: int) -> None:
        """Raise an error at once if too many nodes refuse the run and no reply is outstanding; they
        will refuse it again."""
        refused = {node for node, trouble in self._trouble.items() if trouble.refused}
        if not refused or set(self.grid.get_node_ids()) - refused - self._known.keys():
            return
        if len(self._known) + len(refused) >= nodes:
            raise EngineError(
                "too many nodes refuse this run",
                expected=f"at least {nodes} participating nodes",
                got=self._joined_and_not(),
                fix="change the experiment, or what the nodes' owners allow (node.toml)",
            )

    def _joined_and_not(self) -> str:
        """Number of nodes that have joined, and the reasons why others have not, as text."""
        texts = [f"node {node}: {trouble.reason}" for node, trouble in self._trouble.items()]
        more = [f"{len(texts) - _NAMED} others"] if len(texts) > _NAMED else []
        return "; ".join([f"{len(self._known)} joined", *texts[:_NAMED], *more])

    def refresh_roster(self) -> bool:
        """Ask new online nodes for their clients; returns True if any joined."""
        strangers = [
            node
            for node in self.grid.get_node_ids()
            if node not in self._known and not self._waits(node)
        ]
        if not strangers:
            return False
        messages = [Message(RecordDict(), node, HELLO) for node in strangers]
        announced: dict[int, Presence] = {}
        trouble = {node: _Trouble() for node in strangers}
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout):
            node = reply.metadata.src_node_id
            if trouble.pop(node, None) is None:
                continue  # it was not asked
            try:
                if reply.has_error():
                    text = f"failed: {reason_of(reply.error)}"
                    trouble[node] = _Trouble(text, is_refusal(reply.error))
                else:
                    announced[node] = self._presence_in(reply.content)
            except Exception as error:  # untrusted input may be anything
                trouble[node] = _Trouble(f"sent an invalid list of clients: {error}")
        self._trouble = {n: t for n, t in self._trouble.items() if n not in strangers} | trouble
        for node, problem in trouble.items():
            problem.reason = " ".join(problem.reason.split())[:_LONGEST]
            log.warning("node %d: %s", node, problem.reason)
        joined = self._owned({node: announced[node] for node in sorted(announced)})
        for node, presence in joined.items():
            log.info("node %d joined with %d clients", node, len(presence.training))
        self._known |= joined
        if joined:
            _write_roster(self._file, self._known)
        return bool(joined)

    def _presence_in(self, content: RecordDict) -> Presence:
        """Read the clients that a node announces.

        Raises:
            ValueError: they are not ids, or too many.
        """
        unpacked = unpack_presence(content)
        presence = _hosted(unpacked.training, unpacked.evaluated)
        claimed = len(_ids([presence]))
        if claimed > self.most:
            raise ValueError(f"claims {claimed} clients, more than the {self.most} it may host")
        return presence

    def _waits(self, node: int) -> bool:
        trouble = self._trouble.get(node)
        if trouble is None or not trouble.pause:
            return False
        trouble.pause -= 1
        return True

    def _owned(self, announced: dict[int, Presence]) -> dict[int, Presence]:
        """Remove ids that also belong to other nodes from the replies of new nodes."""
        before = _ids(self._known.values())
        ids = [_ids([presence]) for presence in announced.values()]
        named, times = np.unique(np.concatenate(ids or [before[:0]]), return_counts=True)
        taken = np.union1d(before, named[times > 1])
        owned = {}
        for node, presence in announced.items():
            foreign = np.isin(_ids([presence]), taken)
            if foreign.any():
                log.warning("node %d announces %d clients of other nodes", node, int(foreign.sum()))
            owned[node] = Presence(
                0, np.setdiff1d(presence.training, taken), np.setdiff1d(presence.evaluated, taken)
            )
        return owned


def _hosted(training: np.ndarray, evaluated: np.ndarray) -> Presence:
    """The clients of a real node, whatever else it reports.

    Raises:
        ValueError: they are not ids.
    """
    return Presence(0, _clean(training), _clean(evaluated))


def _clean(ids: np.ndarray) -> np.ndarray:
    if ids.ndim != 1 or ids.dtype != np.int64 or (ids < 0).any():
        raise ValueError("expected whole numbers >= 0")
    distinct = np.unique(ids)
    if len(distinct) != len(ids):
        raise ValueError("duplicate client")
    return distinct


def _ids(presences: Iterable[Presence]) -> np.ndarray:
    parts = [np.union1d(presence.training, presence.evaluated) for presence in presences]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def most_common_parameters(grid: Grid, roster: Roster, *, timeout: float) -> dict[str, np.ndarray]:
    """Request the initial parameters of up to five nodes, and return the most common ones; in a
    tie, those of the first node.

    Raises:
        ClientError: no node returns finite parameters.
    """
    asked = roster.nodes[:ASKED]
    messages = [Message(RecordDict(), node, INITIAL) for node in asked]
    arrays: dict[int, dict[str, np.ndarray]] = {}
    for reply in grid.send_and_receive(messages, timeout=timeout):
        node = reply.metadata.src_node_id
        try:
            if node in asked and not reply.has_error():
                arrays[node] = _finite(read_arrays(reply.content))
        except Exception as error:  # untrusted input may be anything
            log.warning("node %d returned no valid initial parameters: %s", node, error)
    if not arrays:
        raise ClientError("no node returned finite initial parameters", fix="see the log")
    votes = {
        node: sum(_alike(arrays[node], other) for other in arrays.values())
        for node in asked
        if node in arrays
    }
    best = max(votes, key=votes.__getitem__)
    for node, count in votes.items():
        if count < votes[best]:
            log.warning("node %d returned initial parameters unlike those of most nodes", node)
    return arrays[best]


def _finite(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if not arrays or not all(a.dtype.kind == "f" and np.isfinite(a).all() for a in arrays.values()):
        raise ValueError("a parameter is not finite, or all are missing")
    return arrays


def _alike(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return list(first) == list(second) and all(
        first[name].shape == second[name].shape
        and np.allclose(first[name], second[name], rtol=1e-4, atol=1e-6)
        for name in first
    )
