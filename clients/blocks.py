# SPDX-License-Identifier: Apache-2.0
"""The fast path of a node: its clients are trained in blocks (`fedrec.cohort`) instead of one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import numpy as np
from torch import Tensor

from clients.hosting import Node
from clients.local import run_step
from clients.steps.base import CohortStep, Step
from fedrec.cohort.sizing import cut_blocks
from fedrec.cohort.trained import Trained
from fedrec.errors import ClientError, FedrecError
from fedrec.rng import stream


def in_blocks(step: Step, node: Node, parameters: dict[str, Tensor]) -> TypeGuard[CohortStep]:
    """Whether the clients of a step can be trained in blocks; private parameters need a start of their own each."""
    wanted = node.experiment.engine.path == "cohort" and isinstance(step, CohortStep)
    return wanted and not step.private_names(list(parameters))


def train_in_blocks(
    node: Node, step: CohortStep, parameters: dict[str, Tensor], clients: np.ndarray, stream_name: str, round_: int
) -> Iterator[tuple[list[int], Trained]]:
    """Train clients in blocks.

    Yields:
        Places in `clients` of a block's members, and the trained block. The blocks depend on the clients' data alone.

    Raises:
        ClientError: the work on a block failed; names its clients.
        FedrecError: the step raised one; of the same kind, with the client named before it.
    """
    data = [node.population.client(client) for client in clients.tolist()]
    batches = []
    for one in data:
        try:
            batches.append(step.batches(one, stream(node.experiment.seed, stream_name, one.client, round_)))
        except FedrecError as error:
            raise error.about(f"client {one.client}") from error
    memory = node.experiment.engine.memory_gib
    for places in cut_blocks(batches, parameters, node.model.item_tables, memory_gib=memory):
        users = [data[place].features for place in places]
        block = step.block(users, [batches[place] for place in places], node.device)
        try:
            trained = step.train_block(parameters, block)
        except FedrecError:
            raise
        except Exception as error:
            raise _blame(
                node, step, parameters, [data[place].client for place in places], stream_name, round_
            ) from error
        yield places, trained


def _blame(
    node: Node, step: CohortStep, parameters: dict[str, Tensor], clients: list[int], stream_name: str, round_: int
) -> FedrecError:
    """The error of the client that makes a block fail, found by doing their work again one after the other."""
    for client in clients:
        try:
            run_step(step, parameters, node, client, stream_name, round_)
        except FedrecError as error:
            return error
    return ClientError(
        f"step {type(step).__name__!r} failed for a block of clients, and for none of them alone (round {round_})",
        expected=f"updates of clients {', '.join(map(str, clients))}",
        got="an error in the block",
        fix="--set engine.path=reference trains one client after the other",
    )
