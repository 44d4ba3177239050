# SPDX-License-Identifier: Apache-2.0
"""The node that a Flower context describes: of a simulation, or a real one."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from clients.hosting.node import Node
from fedrec.experiment.loading import from_run_config


def is_real(context: Context) -> bool:
    """Whether a context is that of a real node; determined by the node's own configuration, not by
    the server."""
    return "private-dir" in context.node_config


def node_of(context: Context) -> Node:
    """The node that a Flower context describes; made once per process.

    Reads `partition-id` and `num-partitions` from the node configuration and the experiment from
    the run configuration; real nodes are made by `clients.device.device_node`.
    """
    if is_real(context):
        from clients.device.device_node import (
            device_node_of,  # imports certificates, which simulations do not need
        )

        return device_node_of(context)
    given = context.run_config
    config = context.node_config
    experiment = str(given.get("resolved") or from_run_config(given).model_dump_json())
    output = str(given.get("output", "") or "")
    return _node(
        experiment, int(config.get("partition-id", 0)), int(config.get("num-partitions", 1)), output
    )


@lru_cache(maxsize=64)
def _node(experiment: str, partition: int, nodes: int, output: str) -> Node:
    private = Path(output) / "private" if output else None
    return Node(from_run_config({"resolved": experiment}), partition, nodes, private)
