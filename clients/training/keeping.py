# SPDX-License-Identifier: Apache-2.0
"""What clients of a node keep of a round: their private parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clients.hosting.node import Node
from fedrec.errors import ClientError
from fedrec.experiment.phases import rounds_before_last_phase


def keep_private(node: Node, kept: Mapping[int, Mapping[str, np.ndarray]], round_: int) -> None:
    """Write down the private parameters of some clients after a round; nothing where there are
    none.

    Raises:
        ClientError: the node has nowhere to keep them.
    """
    if not kept:
        return
    if node.private is None:
        raise ClientError(
            "there is nowhere to keep private parameters",
            expected="a run folder, for the private state of the clients",
            got=f"private parameters {list(next(iter(kept.values())))}",
            fix="give the run an output folder",
        )
    node.private.save_all(kept, round_, keep=_rounds(node))


def _rounds(node: Node) -> int:
    """Rounds whose private state remains: a resumed run may start from any kept checkpoint, and
    needs the private state of that round.

    The oldest goes when the newest is written, which may still be going on while the round after it
    trains. Where training is ended by validation users, the run ends with an earlier round.
    """
    experiment = node.experiment
    watch, back = experiment.early_stopping, 0
    if watch is not None:
        back = rounds_before_last_phase(experiment) + watch.every * (watch.patience + 1)
    return experiment.checkpoint.every * experiment.checkpoint.keep + 2 + back
