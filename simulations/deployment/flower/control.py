# SPDX-License-Identifier: Apache-2.0
"""The operator's calls to a SuperLink: register and list nodes, list and stop runs.

Missing in Flower: a public Python interface for them. Its command `flwr` starts a Python for each
call, which takes a second of a core, and `up` makes some for every node.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, get_type_hints

from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.supercore.control import ControlHttpClient

from simulations.deployment.pki.node_signatures import as_sent

_REMOVED = "unregistered"  # status of nodes by Flower


@dataclass(frozen=True)
class NodeState:
    """A registered node, by the SuperLink.

    Attributes:
        node: Flower's id.
        status: such as `online`.
        public_key: as it was registered.
        name: with which it was registered, that of its folder.
        interval: largest number of seconds between its heartbeats.
        until: when the SuperLink takes, or took, it for lost without another heartbeat, in seconds
            since 1970; 0: it was never there.
    """

    node: int
    status: str
    public_key: bytes
    name: str = ""
    interval: float = 0.0
    until: float = 0.0

    def heard(self, now: float) -> str:
        """When it was last heard of, in words.

        Args:
            now: seconds since 1970.
        """
        lost = HEARTBEAT_PATIENCE * self.interval
        if not self.until:
            return "never"
        if self.status != "online":
            return (
                f"not after {_clock(self.until)}, when it was stopped, or found lost {lost:.0f} s"
                " after its last heartbeat"
            )
        last = self.until - lost
        age = max(0.0, now - last)
        if age <= self.interval:
            return f"{age:.0f} s ago"
        return (
            f"not since {_clock(last)} ({age:.0f} s; heartbeats come every {self.interval:.0f} s,"
            f" it is lost after {lost:.0f} s)"
        )

    def overdue(self, now: float) -> bool:
        """Whether a heartbeat is due that has not come."""
        return now > self.until - (HEARTBEAT_PATIENCE - 1) * self.interval


@dataclass(frozen=True)
class RunState:
    """A run, by the SuperLink: `status` such as `running` or `finished:failed`, `details`
    of a failure."""

    run: int
    status: str
    details: str = ""


class Control:
    """The operator's calls to a SuperLink.

    Args:
        address: HOST:PORT of the SuperLink.
        authority: certificate of the authority that signed its own.
    """

    def __init__(self, address: str, authority: Path) -> None:
        self._client = ControlHttpClient.from_server_address(
            address, insecure=False, root_certificates=authority.read_bytes(), interceptors=()
        )

    def register(self, public_key: bytes, name: str) -> int:
        """Register a node by its public key in OpenSSH's format; returns its id, also of a
        registered one."""
        point = as_sent(public_key)
        for known in self.nodes():
            if known.public_key == point:
                return known.node
        return self._call("RegisterNode", public_key=point, name=name).node_id

    def unregister(self, public_key: bytes) -> bool:
        """Remove the node with a public key in OpenSSH's format, whose calls are then refused;
        returns whether there was one."""
        point = as_sent(public_key)
        found = [known.node for known in self.nodes() if known.public_key == point]
        for node in found:
            self._call("UnregisterNode", node_id=node)
        return bool(found)

    def nodes(self) -> list[NodeState]:
        """All registered nodes; Flower also lists those that were removed."""
        found = self._call("ListNodes").nodes_info
        return [
            NodeState(
                node.node_id,
                node.status,
                node.public_key,
                node.name,
                node.heartbeat_interval,
                node.online_until,
            )
            for node in found
            if node.status != _REMOVED
        ]

    def runs(self) -> list[RunState]:
        """All runs, newest first."""
        runs = self._call("ListRuns").run_dict.values()
        found = sorted(runs, key=lambda run: (run.pending_at, run.run_id), reverse=True)
        return [RunState(run.run_id, _status(run.status), run.status.details) for run in found]

    def log(self, run: int) -> str:
        """The output of the ServerApp of a run that ended."""
        return "".join(part.log_output for part in self._call("StreamLogs", run_id=run))

    def stop(self, run: int) -> None:
        """End a run; its run folder can be resumed."""
        self._call("StopRun", run_id=run)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _call(self, method: str, /, **fields: Any) -> Any:
        """Make one of the client's calls, whose request has these fields."""
        call = getattr(self._client, method)
        return call(get_type_hints(call)["request"](**fields))


def _status(status: Any) -> str:
    return f"{status.status}:{status.sub_status}".rstrip(":")


def _clock(moment: float) -> str:
    """The local time of a moment in seconds since 1970."""
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")
