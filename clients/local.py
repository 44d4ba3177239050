# SPDX-License-Identifier: Apache-2.0
"""One client's local work: its data, its random stream, its private parameters, and errors that name it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clients.hosting import Node
from clients.steps.base import Step, Update
from fedrec.errors import ClientError, FedrecError
from fedrec.rng import stream


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
        raise error.about(f"client {client}") from error
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
            expected=repr({name: tuple(value.shape) for name, value in parameters.items()}),
            got=repr({name: tuple(value.shape) for name, value in update.delta.items()}),
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
