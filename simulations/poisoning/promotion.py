# SPDX-License-Identifier: Apache-2.0
"""What attacks that promote targets share: scores of the targets for some users, made-up users, and
learning rates."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clients.hosting.malicious import MaliciousBlock
from clients.local.patterns import rates_by_name
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Parameters
from fedrec.rng import torch_stream

Users = tuple[Parameters, tuple[Tensor, ...]]
"""Private parameters `[U, ...]` of some users, and their category codes per feature,
`int64 [U, width]`."""


def generator_of(random: np.random.Generator) -> torch.Generator:
    """A generator of torch from a client's stream, on the CPU."""
    return torch.Generator().manual_seed(int(random.integers(2**62)))


def target_scores(block: MaliciousBlock, parameters: Parameters, users: Users) -> Tensor:
    """Scores of the targets, `[U, targets]`.

    Args:
        block: knows targets and model.
        parameters: the shared ones, without cohort dimension.
        users: the users.

    Raises:
        ExperimentError: the model represents users by whole histories.
    """
    if isinstance(block.model, HistoryModel):
        name = type(block.model).__name__
        raise ExperimentError(
            f"{name} represents users by whole histories, which this attack has none of",
            expected="a model that predicts single items, such as privrec, mf or neumf",
            got=f"model {name}",
            fix="set adversary.attack = 'random', or another attack with made-up profiles",
        )
    own, features = users
    count = max([1, *map(len, [*own.values(), *features])])
    tables = {name: value.expand(count, *value.shape) for name, value in parameters.items()}
    targets = torch.from_numpy(block.known.targets).to(next(iter(tables.values())).device)
    return block.model.predict({**tables, **own}, features, targets.expand(count, -1))


def made_up_users(
    block: MaliciousBlock, count: int, std: float, generator: torch.Generator
) -> Users:
    """Users with normal private parameters around zero, and random categories.

    Args:
        block: knows the model.
        count: their number.
        std: standard deviation of the private parameters.
        generator: of random numbers, on the CPU.
    """
    device = block.step.device
    private = [name for name in block.parameters if name not in block.shared]
    own = {
        name: (std * torch.randn(count, *block.parameters[name].shape, generator=generator)).to(
            device
        )
        for name in private
    }
    features = tuple(
        torch.randint(categories, (count, 1), generator=generator).to(device)
        for _, categories in block.model.schema.user_features
    )
    return own, features


def learning_rates(block: MaliciousBlock) -> dict[str, float]:
    """Learning rate of each shared parameter in honest clients' steps; 0.1 for steps without."""
    config = block.step.config
    rate = float(getattr(config, "learning_rate", 0.1))
    factors: Mapping[str, float] = rates_by_name(
        list(block.parameters), getattr(config, "rates", {})
    )
    return {name: rate * factors[name] for name in block.shared}


def seed_of_round(block: MaliciousBlock) -> torch.Generator:
    """A generator that all malicious clients of a round share, on the CPU."""
    return torch_stream(block.known.seed, "coalition", block.round)


def embedding_tables(block: MaliciousBlock) -> list[str]:
    """Names of the shared item tables with more than one column."""
    return [
        name
        for name in block.model.item_tables
        if name in block.shared and block.parameters[name].shape[1] > 1
    ]


def gradients_of(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a number `[]` by some leaves, `[...]` each; zeros by those that it does not
    depend on."""
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
