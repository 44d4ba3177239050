# SPDX-License-Identifier: Apache-2.0
"""A training round on one node: train the clients that were asked for, one after the other, and add their updates.

This is the reference path. Sums are taken in ascending order of client id and in float64, so that they depend neither
on the order of messages nor, up to the last float32 digit, on how many nodes share the work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from clients.blocks import in_blocks, train_in_blocks
from clients.hosting import Node
from clients.local import personal_parameters, run_step, to_device
from clients.steps.base import Step, Update
from fedrec.cohort.trained import Trained
from fedrec.errors import ClientError
from fedrec.experiment import Section
from fedrec.row_sum import Change, RowAccumulator, RowSum
from fedrec.wire import TrainOrder, TrainSum, Weighting


def train_clients(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> TrainSum:
    """Train the clients of an order and add up their weighted updates.

    Raises:
        ClientError: a client's work failed; names the client, the step and its data.
    """
    step = node.step(_section(node, order))
    parameters = to_device(arrays, node.device)
    clients = node.training if order.clients is None else np.sort(order.clients)
    total = _Total(arrays, node.model.item_tables)
    for worker, part in step.assign(clients):
        if in_blocks(worker, node, parameters):
            for _, trained in train_in_blocks(node, worker, parameters, part, "client", order.round):
                total.add_block(trained, order.weighting)
        else:
            for client in part.tolist():
                total.add(_train(node, worker, parameters, client, order.round), order.weighting)
    return TrainSum(total.changes(), len(clients), total.weight, total.examples, total.loss, total.losses)


class _Total:
    """Running sums of a node, in float64.

    Args:
        arrays: the global parameters.
        item_tables: names of those of which clients touch few rows.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], item_tables: Collection[str]) -> None:
        self.arrays, self.item_tables = arrays, item_tables
        self.dense = {
            name: np.zeros(array.shape, dtype=np.float64) for name, array in arrays.items() if name not in item_tables
        }
        self.tables = {name: RowAccumulator(arrays[name].shape) for name in item_tables if name in arrays}
        self.weight, self.examples = 0.0, 0
        self.loss, self.losses = 0.0, 0

    def add(self, update: Update, weighting: Weighting) -> None:
        """One client's update."""
        share = _share(update.examples, weighting)
        for name, delta in update.delta.items():
            change = share * delta.cpu().numpy().astype(np.float64)
            if name in self.tables:
                rows = np.flatnonzero(change.any(axis=1))
                self.tables[name].add(rows, change[rows])
            else:
                self.dense[name] += change
        self._count(share, update.examples, update.loss)

    def add_block(self, trained: Trained, weighting: Weighting) -> None:
        """The updates of a whole block."""
        shares = [_share(examples, weighting) for examples in trained.block.examples]
        weights = torch.tensor(shares, dtype=torch.float64)
        for name, value in trained.dense_sums(weights).items():
            self.dense[name] += value.cpu().numpy()
        for name, table in self.tables.items():
            items, moved, drift = trained.row_sums(name, weights)
            table.add(items.cpu().numpy(), moved.cpu().numpy(), drift)
        for share, examples, loss in zip(shares, trained.block.examples, trained.losses(), strict=True):
            self._count(share, examples, loss)

    def changes(self) -> dict[str, Change]:
        """The sums in the parameters' own type; of a table of which less than half the rows changed, these rows."""
        found: dict[str, Change] = {name: value.astype(self.arrays[name].dtype) for name, value in self.dense.items()}
        for name, table in self.tables.items():
            total, kind = table.total(), self.arrays[name].dtype
            if 2 * len(total.rows) < total.shape[0]:
                found[name] = RowSum(total.shape, total.rows, total.values.astype(kind), total.drift)
            else:
                found[name] = total.dense(self.arrays[name]).astype(kind)
        return found

    def _count(self, share: float, examples: int, loss: float) -> None:
        self.weight, self.examples = self.weight + share, self.examples + examples
        if math.isfinite(loss):
            self.loss, self.losses = self.loss + loss, self.losses + 1


def _share(examples: int, weighting: Weighting) -> float:
    return 1.0 if weighting == "uniform" else float(examples)


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
