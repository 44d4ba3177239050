# SPDX-License-Identifier: Apache-2.0
"""One client's local work: its data, its random stream, its private parameters, and errors that
name it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clients.hosting.node import Node
from clients.hosting.step_checks import Versions, refuse_wrong_update
from clients.step import Step, Update
from fedrec.components.errors import file_of, line_of
from fedrec.data.client_data import ClientData
from fedrec.errors import ClientError, FedrecError
from fedrec.rng import stream


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Numpy parameters as tensors on a device."""
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def run_step(
    step: Step,
    parameters: Mapping[str, Tensor],
    node: Node,
    client: int,
    stream_name: str,
    round_: int,
) -> Update:
    """One client's local work, with errors that name the client, the step and its data.

    Raises:
        ClientError: the step raised.
        ComponentError: the step changed what it was given, or returned something else than an
            update of it.
        FedrecError: the step raised one; of the same kind, with the client named before it.
    """
    data = node.population.client(client)
    doing = f"for client {client} (round {round_}, node {node.partition})"
    untouched = Versions(parameters)
    try:
        with node.products():
            update = step.update(
                parameters, data, stream(node.experiment.seed, stream_name, client, round_)
            )
    except FedrecError as error:  # its text is complete except for the client
        raise error.about(f"client {client}") from error
    except Exception as error:
        raise client_error(step, node, data, round_, error) from error
    refuse_wrong_update(step, update, parameters, doing)
    untouched.refuse(step, doing)
    return update


def client_error(
    step: Step, node: Node, data: ClientData, round_: int, error: Exception
) -> ClientError:
    """The error of a client whose work raised an error that does not explain itself."""
    return ClientError(
        f"client {data.client} failed in step {type(step).__name__!r} (round {round_}, node"
        f" {node.partition}) of {file_of(step)}",
        expected=(
            f"an update from {len(data.items)} rows ({len(data.positives)} positives) with"
            f" {step.config!r}"
        ),
        got=f"{type(error).__name__}: {error} ({line_of(error)})",
        fix="run with --engine serial --debug for the whole traceback",
    )


def personal_parameters(
    node: Node, step: Step, parameters: dict[str, Tensor], client: int, before_round: int
) -> dict[str, Tensor]:
    """The initial parameters of a client: the shared ones, replaced by its private ones where they
    exist."""
    if node.private is None or not step.private_names(list(parameters)):
        return parameters
    own = to_device(node.private.load(client, before_round), node.device)
    return {name: own.get(name, value) for name, value in parameters.items()}


def private_parameters(
    node: Node, step: Step, parameters: dict[str, Tensor], clients: np.ndarray, before_round: int
) -> dict[str, Tensor]:
    """The clients' private parameters, which replace the shared values, `[C, ...]` each."""
    names = step.private_names(list(parameters))
    if node.private is None or not names:
        return {}
    kept = node.private.load_all(clients.tolist(), before_round)
    shared = {name: parameters[name].cpu().numpy() for name in names}
    return to_device(
        {name: np.stack([one.get(name, value) for one in kept]) for name, value in shared.items()},
        node.device,
    )
