# SPDX-License-Identifier: Apache-2.0
"""The operator's calls to a SuperLink: register and list nodes, list and stop runs.

Missing in Flower: a public Python interface for them. Its command `flwr` starts a Python for each
call, which takes a second of a core, and `up` makes some for every node.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from flwr.supercore.control import ControlHttpClient

from simulations.deployment.pki.node_signatures import as_sent

_REMOVED = "unregistered"  # status of nodes by Flower


@dataclass(frozen=True)
class NodeState:
    """A registered node, by the SuperLink."""

    node: int
    status: str
    public_key: bytes


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
            NodeState(node.node_id, node.status, node.public_key)
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
