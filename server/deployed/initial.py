# SPDX-License-Identifier: Apache-2.0
"""Initial parameters from untrusted nodes, by majority. They are a function of the experiment, so
honest nodes return the same bits, up to differences in rounding between machines."""

from __future__ import annotations

import logging

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedrec.errors import ClientError
from fedrec.protocol.messages import INITIAL, unpack_parameters
from server.cohort import Roster

log = logging.getLogger("fedrec")
ASKED = 5


def most_common_parameters(grid: Grid, roster: Roster, *, timeout: float) -> dict[str, np.ndarray]:
    """The initial parameters that most of up to five nodes return; in a tie, those of the first
    node.

    Raises:
        ClientError: no node returns finite parameters.
    """
    messages = [Message(RecordDict(), node, INITIAL) for node in roster.nodes[:ASKED]]
    place = {node: index for index, node in enumerate(roster.nodes)}
    came = [
        reply for reply in grid.send_and_receive(messages, timeout=timeout) if not reply.has_error()
    ]
    replies = sorted(came, key=lambda reply: place.get(reply.metadata.src_node_id, len(place)))
    found: list[tuple[int, dict[str, np.ndarray]]] = []
    for reply in replies:
        try:
            found.append((reply.metadata.src_node_id, _checked(unpack_parameters(reply.content))))
        except Exception as error:  # untrusted input may be anything
            log.warning("node %d gave no initial parameters: %s", reply.metadata.src_node_id, error)
    if not found:
        raise ClientError(
            "no node returned initial parameters",
            expected="finite arrays",
            got="none",
            fix="see the log",
        )
    votes = [sum(_alike(one, other) for _, other in found) for _, one in found]
    best = int(np.argmax(votes))
    for (node, _), count in zip(found, votes, strict=True):
        if count < votes[best]:
            log.warning("node %d gave other initial parameters than most", node)
    return found[best][1]


def _checked(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for name, array in arrays.items():
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise ValueError(f"{name!r} is not finite")
    if not arrays:
        raise ValueError("no arrays")
    return arrays


def _alike(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(
        one[name].shape == other[name].shape
        and np.allclose(one[name], other[name], rtol=1e-4, atol=1e-6)
        for name in one
    )
