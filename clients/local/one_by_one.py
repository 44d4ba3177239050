# SPDX-License-Identifier: Apache-2.0
"""Training of a block's clients one after the other, for steps that draw their batches while they
train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from clients.local.updates import Updates
from fedrec.cohort.batches import OwnData
from fedrec.cohort.block import Block
from fedrec.data.client_data import ClientData


@dataclass(frozen=True, eq=False)
class Update:
    """The result of one client's local training.

    Attributes:
        delta: `theta_local - theta_global` per parameter, on the step's device.
        examples: number of examples in one epoch (rows and negatives).
        loss: mean loss over the last epoch; NaN without examples.
    """

    delta: dict[str, Tensor]
    examples: int = 0
    loss: float = math.nan


def as_block(start: Mapping[str, Tensor], update: Update) -> Updates:
    """The update of a client, as a block of this client alone; `start` are the global
    parameters."""
    changes = {name: value.unsqueeze(0) for name, value in update.delta.items()}
    return Updates(start, Block.without_batches([update.examples]), changes, [update.loss])


Train = Callable[[dict[str, Tensor], ClientData, np.random.Generator], Update]


def one_by_one(
    parameters: Mapping[str, Tensor],
    block: Block,
    own: Mapping[str, Tensor] | None,
    train: Train,
) -> Updates:
    """Train a block of clients one after the other, as a step's `train_block` does.

    Args:
        parameters: the global ones, without cohort dimension, unchanged.
        block: the clients, with the batches of `Step.batches` by default: their data.
        own: the clients' saved private parameters, `[C, ...]` each.
        train: one client's training, from its parameters (without cohort dimension, not to be
            changed), its data and its random stream.

    Raises:
        TypeError: the clients' batches are others, or what `train` returns is no update.
    """
    found = []
    for place, member in enumerate(block.members):
        if not isinstance(member, OwnData):
            raise TypeError(f"Expected the clients' data (OwnData), got {type(member).__name__}.")
        start = {**parameters, **{name: value[place] for name, value in (own or {}).items()}}
        update = train(start, member.data, member.random)
        if not isinstance(update, Update):
            raise TypeError(f"Expected an Update, got {type(update).__name__}.")
        found.append(update)
    names = found[0].delta if found else {}
    changes = {name: torch.stack([update.delta[name] for update in found]) for name in names}
    counted = replace(block, examples=tuple(update.examples for update in found))
    losses = [update.loss for update in found]
    return Updates(parameters, counted, changes, losses, own or {})
