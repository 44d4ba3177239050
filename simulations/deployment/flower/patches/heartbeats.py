# SPDX-License-Identifier: Apache-2.0
"""The intervals of heartbeats: a lost node is found sooner, a busy ServerApp is not taken for lost.

Missing in Flower: settings for them. A node sends a heartbeat every 30 s and is lost after two; a
ServerApp is lost after 60 s without one.
"""

from __future__ import annotations

from flwr.supercore import heartbeat

HEARTBEAT = 15.0
"""Seconds between a node's heartbeats (Flower's default is 30, its minimum 10); a node is lost
after two. With shorter intervals a killed node is replaced earlier; with longer ones the SuperLink
may be offline for longer before it regards nodes as lost."""
TASK_SILENCE = 150.0
"""Half of the seconds without a heartbeat after which the SuperLink regards a ServerApp as lost
(Flower: 30); long enough for a machine to be suspended for some minutes. The executor reports a
ServerApp that ended immediately."""


class NodeHeartbeats:
    """The state of a SuperLink whose nodes are lost after two of `HEARTBEAT`."""

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """As Flower's."""
        return super().activate_node(node_id, min(heartbeat_interval, HEARTBEAT))  # type: ignore[misc]

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        """As Flower's."""
        return super().acknowledge_node_heartbeat(  # type: ignore[misc]
            node_id, min(heartbeat_interval, HEARTBEAT)
        )


def use_in_supernode() -> None:
    """Send a node's heartbeats every `HEARTBEAT` seconds."""
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT  # type: ignore[attr-defined]


def use_in_superlink() -> None:
    """Regard tasks as lost after two of `TASK_SILENCE`."""
    from flwr.supercore.corestate import sql_corestate

    sql_corestate.HEARTBEAT_DEFAULT_INTERVAL = TASK_SILENCE  # type: ignore[attr-defined]
