# SPDX-License-Identifier: Apache-2.0
"""Asking nodes which items' rows their clients need, before parameters are generated for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedrec.experiment.tables import EngineConfig
from fedrec.protocol.client_arrays import ItemRequests
from fedrec.protocol.messages import ITEMS, pack_item_query, unpack_item_requests
from fedrec.protocol.orders import ItemQuery, Purpose
from server.exchange.replies import answers


def request_items(
    grid: Grid,
    engine: EngineConfig,
    groups: Mapping[int, np.ndarray],
    round_number: int,
    purpose: Purpose,
    step: dict[str, Any],
) -> dict[int, ItemRequests]:
    """By node, in the order of `groups`, what its clients need; without the nodes that failed.

    Args:
        grid: reaches the nodes.
        engine: timeout, and how many failures are tolerated.
        groups: node id to the clients, `int64 [clients]`.
        round_number: the round that the parameters are for.
        purpose: training, or evaluation on held-out rows.
        step: name and settings of the clients' step.

    Raises:
        ClientError: too many nodes failed.
    """
    messages = [
        Message(pack_item_query(ItemQuery(round_number, clients, purpose, step)), node, ITEMS)
        for node, clients in groups.items()
    ]
    replies = grid.send_and_receive(messages, timeout=engine.timeout) if messages else []
    good = answers(replies, sent=list(groups), max_failures=engine.max_failures)
    found = {reply.metadata.src_node_id: unpack_item_requests(reply.content) for reply in good}
    return {node: found[node] for node in groups if node in found}
