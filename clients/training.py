# SPDX-License-Identifier: Apache-2.0
"""A training round on one node: train the clients that were asked for, one after the other, and add their updates.

This is the reference path. Sums are taken in ascending order of client id and in float64, so that they depend neither
on the order of messages nor, up to the last float32 digit, on how many nodes share the work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clients.hosting import Node
from clients.steps.base import Step, Update
from fedrec.errors import ClientError, FedrecError
from fedrec.experiment import Section
from fedrec.rng import stream
from fedrec.wire import TrainOrder, TrainSum


def train_clients(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> TrainSum:
    """Train the clients of an order and add up their weighted updates.

    Raises:
        ClientError: a client's work failed; names the client, the step and its data.
    """
    step = node.step(_section(node, order))
    parameters = to_device(arrays, node.device)
    total = {name: np.zeros(array.shape, dtype=np.float64) for name, array in arrays.items()}
    clients = node.training if order.clients is None else np.sort(order.clients)
    weight, examples, loss, losses = 0.0, 0, 0.0, 0
    for client in clients.tolist():
        update = _train(node, step, parameters, client, order.round)
        share = 1.0 if order.weighting == "uniform" else float(update.examples)
        for name, delta in update.delta.items():
            total[name] += share * delta.cpu().numpy().astype(np.float64)
        weight, examples = weight + share, examples + update.examples
        if math.isfinite(update.loss):
            loss, losses = loss + update.loss, losses + 1
    sums = {name: value.astype(arrays[name].dtype) for name, value in total.items()}
    return TrainSum(sums, len(clients), weight, examples, loss, losses)


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Numpy parameters as tensors on a device."""
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def run_step(
    step: Step, parameters: Mapping[str, Tensor], node: Node, client: int, stream_name: str, round_: int
) -> Update:
    """One client's local work, with errors that name the client, the step and its data.

    Raises:
        ClientError: the step raised, or returned other parameters than it was given.
        FedrecError: the step raised one; of the same kind, with the client named before it.
    """
    data = node.population.client(client)
    try:
        update = step.update(parameters, data, stream(node.experiment.seed, stream_name, client, round_))
    except FedrecError as error:  # it explains itself, but not whose data it is about
        raise type(error)(
            f"client {client}: {error.problem}", expected=error.expected, got=error.got, fix=error.fix
        ) from error
    except Exception as error:
        raise ClientError(
            f"client {client} failed in step {type(step).__name__!r} (round {round_}, node {node.partition})",
            expected=f"an update from {len(data.items)} rows ({len(data.positives)} positives) with {step.config!r}",
            got=f"{type(error).__name__}: {error}",
            fix="run with --engine serial --debug for the whole traceback",
        ) from error
    wrong = [
        name for name in parameters if name not in update.delta or update.delta[name].shape != parameters[name].shape
    ]
    if wrong or len(update.delta) != len(parameters):
        raise ClientError(
            f"step {type(step).__name__!r} returned wrong parameters for client {client}",
            expected={name: tuple(value.shape) for name, value in parameters.items()}.__repr__(),
            got={name: tuple(value.shape) for name, value in update.delta.items()}.__repr__(),
        )
    return update


def personal_parameters(
    node: Node, step: Step, parameters: dict[str, Tensor], client: int, before_round: int
) -> dict[str, Tensor]:
    """The parameters that a client starts from: the shared ones, with its own private ones in their places."""
    if node.private is None or not step.private_names(list(parameters)):
        return parameters
    own = to_device(node.private.load(client, before_round), node.device)
    return {name: own.get(name, value) for name, value in parameters.items()}


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
