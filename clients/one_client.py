# SPDX-License-Identifier: Apache-2.0
"""One client's parameters and its update."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from clients.node import Node
from clients.step import PrivateParameters, Step
from clients.steps.descent import Update
from fedrec.data.client_data import ClientData
from fedrec.device import on_device
from fedrec.rng import stream


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Numpy parameters as tensors on a device."""
    return {name: on_device(array, device) for name, array in arrays.items()}


def update_of(
    step: Step, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
) -> Update:
    """The update of a client alone, with whole item tables, from the global `parameters` (without
    cohort dimension, unchanged)."""
    block = step.block([data.features], [step.batches(data, random)], step.device)
    block = block.on_whole_tables(step.model.schema.num_items)
    trained = step.train_block(parameters, block)
    return Update(trained.changes_of(0), trained.block.examples[0], trained.losses()[0])


def private_parameters(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    before_round: int,
    without: Collection[str] = (),
) -> dict[str, Tensor]:
    """The clients' private parameters, which replace the shared values, `[C, ...]` each, `without`
    some. Those of a client that has none yet are the shared values, or its own with
    `private-std`."""
    names = [name for name in step.private_names(list(parameters)) if name not in without]
    if node.private is None or not names:
        return {}
    values = {
        name: np.repeat(parameters[name].numpy(force=True)[None], len(clients), axis=0)
        for name in names
    }
    fresh = set(range(len(clients)))
    for positions, saved in node.private.load_all(clients.tolist(), before_round, names):
        for name, arrays in saved.items():
            values[name][positions] = arrays
            fresh.difference_update(positions)
    if isinstance(step.config, PrivateParameters) and step.config.private_std is not None:
        for position in sorted(fresh):
            random = stream(node.experiment.seed, "private", int(clients[position]))
            for value in values.values():
                value[position] = step.config.private_std * random.standard_normal(value.shape[1:])
    return to_device(values, node.device)
