# SPDX-License-Identifier: Apache-2.0
"""A training round on one node: train the clients that were asked for, one after the other, and add their updates.

This is the reference path. Sums are taken in ascending order of client id and in float64, so that they depend neither
on the order of messages nor, up to the last float32 digit, on how many nodes share the work.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clients.blocks import in_blocks, train_in_blocks
from clients.hosting import Node
from clients.local import personal_parameters, run_step, to_device
from clients.steps.base import Step, Update
from clients.total import Total
from fedrec.errors import ClientError
from fedrec.experiment import Section
from fedrec.wire import TrainOrder, TrainSum


def train_clients(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> TrainSum:
    """Train the clients of an order and add up their weighted, or protected, updates.

    Raises:
        ClientError: a client's work failed; names the client, the step and its data.
    """
    step = node.step(_section(node, order)).in_round(order.round)
    parameters = to_device(arrays, node.device)
    clients = node.training if order.clients is None else np.sort(order.clients)
    total = Total(arrays, node.model.item_tables, order.weighting, order.protection, node.noise, order.round)
    for worker, part in step.assign(clients):
        if in_blocks(worker, node, parameters):
            for places, trained in train_in_blocks(node, worker, parameters, part, "client", order.round):
                total.add_block(part[places].tolist(), trained)
        else:
            for client in part.tolist():
                total.add(client, _train(node, worker, parameters, client, order.round))
    return total.sum()


def _train(node: Node, step: Step, parameters: dict[str, Tensor], client: int, round_: int) -> Update:
    private = step.private_names(list(parameters))
    start = personal_parameters(node, step, parameters, client, round_)
    update = run_step(step, start, node, client, "client", round_)
    if not private:
        return update
    if node.private is None:
        raise ClientError(
            "there is nowhere to keep private parameters",
            expected="a run folder, for the private state of the clients",
            got=f"private parameters {private}",
            fix="give the run an output folder",
        )
    kept = {name: (start[name] + update.delta[name]).cpu().numpy() for name in private}
    checkpoints = node.experiment.checkpoint
    # A resumed run may start from any kept checkpoint, and needs the private state of that round.
    node.private.save(client, round_, kept, keep=checkpoints.every * checkpoints.keep + 1)
    sent = {name: torch.zeros_like(d) if name in kept else d for name, d in update.delta.items()}
    return Update(sent, update.examples, update.loss)


def _section(node: Node, order: TrainOrder) -> Section:
    own = node.experiment.step
    table = order.step if order.step is not None else {"name": own.name, **own.options}
    return Section.model_validate({**table, **(order.overrides or {})})
