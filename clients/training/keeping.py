# SPDX-License-Identifier: Apache-2.0
"""Saving of the clients' private parameters after a round."""

from __future__ import annotations

from collections.abc import Mapping

from clients.hosting.node import Node
from fedrec.errors import ClientError
from fedrec.experiment.phases import rounds_before_last_phase
from fedrec.protocol.sparse_update import Change


def keep_private(node: Node, kept: Mapping[int, Mapping[str, Change]], round_: int) -> None:
    """Save the private parameters of some clients after a round; nothing if there are none.

    Raises:
        ClientError: the node has no private state.
    """
    if not kept:
        return
    if node.private is None:
        raise ClientError(
            "private parameters cannot be saved",
            expected="a run folder, for the private state of the clients",
            got=f"private parameters {list(next(iter(kept.values())))}",
            fix="give the run an output folder",
        )
    node.private.save_all(kept, round_, keep=_rounds(node))


def _rounds(node: Node) -> int:
    """Number of rounds whose private state is kept: a resumed run may start from any kept
    checkpoint, and needs the private state of that round. The oldest is deleted when the newest is
    written, which may still continue while the next round trains. With early stopping the run ends
    with the parameters of an earlier round.
    """
    experiment = node.experiment
    watch = experiment.early_stopping
    back = 0
    if watch is not None:
        back = rounds_before_last_phase(experiment) + watch.every * (watch.patience + 1)
    return experiment.checkpoint.every * experiment.checkpoint.keep + 2 + back
