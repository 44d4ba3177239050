# SPDX-License-Identifier: Apache-2.0
"""The interface of poisoning attacks, and their common functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from clients.malicious import MaliciousBlock
from clients.steps.descent import rates_by_name
from fedrec.config import Config
from fedrec.data.population import Known
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Parameters
from fedrec.rng import torch_stream


class Poisoning(ABC):
    """Behaviour of malicious clients. Derive from `ProfilePoisoning` or `UpdatePoisoning`.

    A built-in has a `name` and lives in `simulations/poisoning/`, its configuration
    class above it. It is stateless: its results depend only on its inputs.

    Args:
        config: settings of the attack.

    Attributes:
        sends_updates: whether clients send made-up updates instead of training.
    """

    Config: ClassVar[type[Config]] = Config
    sends_updates: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """Create the items of a malicious client's training rows, `int64 [n]`, distinct, in
        temporal order.

        Args:
            known: knowledge of the adversary.
            random: a stream of this client.
        """


class ProfilePoisoning(Poisoning):
    """Attack by made-up profiles, on which malicious clients train like honest ones. It works
    against every system, centralised ones included."""


class UpdatePoisoningConfig(Config):
    """Settings of attacks with made-up updates."""

    norm: float | None = Field(default=None, gt=0)
    """L2 norm of each malicious update, in units of that of an honest client with a profile of
    random items; default: unscaled."""


class UpdatePoisoning(Poisoning):
    """Attack by made-up updates; a subclass defines `crafted`.

    Malicious clients have profiles of random items, of usual length: the norm of an honest update
    is measured on them (`norm`), and centralised systems are fitted to them.
    """

    Config = UpdatePoisoningConfig
    config: UpdatePoisoningConfig
    sends_updates: ClassVar[bool] = True

    @abstractmethod
    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Craft the updates before scaling, `[C, ...]` by parameter."""

    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """Draw random items without targets, `int64 [n]`."""
        others = np.setdiff1d(np.arange(known.items), known.targets)
        return random.choice(others, size=min(known.usual, len(others)), replace=False)

    def updates(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Crafted updates, scaled to `norm` if it is set, `[C, ...]` by parameter; missing
        parameters are zero."""
        crafted = self.crafted(block)
        if self.config.norm is None:
            return crafted
        squares = [value.double().flatten(1).square().sum(1) for value in crafted.values()]
        norms = sum(squares[1:], squares[0]).sqrt()
        wanted = self.config.norm * block.honest_norms.to(norms)
        factors = wanted / norms.clamp(min=1e-300)
        return {
            name: value * factors.view(-1, *[1] * (value.dim() - 1))
            for name, value in crafted.items()
        }


class ProfileConfig(Config):
    """Settings of made-up profiles."""

    items: int | None = Field(default=None, ge=1)
    """Number of items of a profile, targets included; default: the median of honest clients."""

    def fillers(self, known: Known) -> int:
        """Number of items in addition to the targets."""
        return max(0, (self.items or known.usual) - len(known.targets))


def with_fillers(
    known: Known, random: np.random.Generator, chosen: np.ndarray, count: int
) -> np.ndarray:
    """Combine the targets, chosen items and random others, `int64 [n]`, in random order.

    Args:
        known: knowledge of the adversary.
        random: source of randomness.
        chosen: `int64 [m]`, items without targets.
        count: number of items without targets in all, as far as the catalogue has them.
    """
    taken = np.concatenate([known.targets, chosen])
    others = np.setdiff1d(np.arange(known.items), taken)
    size = min(max(0, count - len(chosen)), len(others))
    return random.permutation(
        np.concatenate([taken, random.choice(others, size=size, replace=False)])
    )


Users = tuple[Parameters, tuple[Tensor, ...]]
"""Private parameters `[U, ...]` of some users, and their category codes per feature,
`int64 [U, width]`."""


def generator_of(random: np.random.Generator) -> torch.Generator:
    """Torch generator from a client's stream, on the CPU."""
    return torch.Generator().manual_seed(int(random.integers(2**62)))


def check_model(block: MaliciousBlock, fits: bool, expected: str) -> None:
    """Check that an attack fits the model, and state what it expects.

    Raises:
        ExperimentError: it does not fit.
    """
    if not fits:
        raise ExperimentError(
            f"this attack cannot attack {type(block.model).__name__}",
            expected=expected,
            got=", ".join(block.shared),
            fix="set adversary.attack = 'random', or another attack with made-up profiles",
        )


def target_scores(block: MaliciousBlock, parameters: Parameters, users: Users) -> Tensor:
    """Scores of the targets, `[U, targets]`.

    Args:
        block: block with targets and model.
        parameters: the shared ones, without cohort dimension.
        users: the users.

    Raises:
        ExperimentError: the model represents users by whole histories.
    """
    items = "a model that predicts single items, such as privrec, mf or neumf"
    check_model(block, not isinstance(block.model, HistoryModel), items)
    params, features = users
    count = max([1, *map(len, [*params.values(), *features])])
    tables = {name: value.expand(count, *value.shape) for name, value in parameters.items()}
    targets = torch.from_numpy(block.known.targets).to(next(iter(tables.values())).device)
    return block.model.predict({**tables, **params}, features, targets.expand(count, -1))


def made_up_users(block: MaliciousBlock, count: int, generator: torch.Generator) -> Users:
    """Make up users with normal private parameters around zero, and random categories.

    Args:
        block: block with the model.
        count: number of users.
        generator: random generator, on the CPU.
    """
    device = block.step.device
    private = [name for name in block.parameters if name not in block.shared]
    params = {
        name: (
            USER_STD * torch.randn(count, *block.parameters[name].shape, generator=generator)
        ).to(device)
        for name in private
    }
    features = tuple(
        torch.randint(categories, (count, 1), generator=generator).to(device)
        for _, categories in block.model.schema.user_features
    )
    return params, features


def learning_rates(block: MaliciousBlock) -> dict[str, float]:
    """Learning rate of each shared parameter in honest clients' steps; 0.1 for steps without."""
    config = block.step.config
    rate = float(getattr(config, "learning_rate", 0.1))
    factors: Mapping[str, float] = rates_by_name(
        list(block.parameters), getattr(config, "rates", {})
    )
    return {name: rate * factors[name] for name in block.shared}


def seed_of_round(block: MaliciousBlock) -> torch.Generator:
    """Generator shared by all malicious clients of a round, on the CPU."""
    return torch_stream(block.known.seed, "coalition", block.round)


def embedding_tables(block: MaliciousBlock) -> list[str]:
    """Names of the shared item tables with more than one column."""
    return [
        name
        for name in block.model.item_tables
        if name in block.shared and block.parameters[name].shape[1] > 1
    ]


def gradients_of(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a scalar `[]` with respect to leaves, `[...]` each; zeros for unused leaves."""
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


# Common part of A-ra and A-hum: the gradient of the targets' loss for made-up users.

MADE_UP = 10
"""Number of made-up users per malicious client and round."""
USER_STD = 0.01
"""Standard deviation of the made-up users' private parameters."""


class MadeUpUsers(UpdatePoisoning):
    """Gradient descent on the cross-entropy of the targets as positives of made-up users, with the
    learning rates of honest clients, over all shared parameters."""

    @abstractmethod
    def users(self, block: MaliciousBlock, generator: torch.Generator) -> Users:
        """Make up the users of one client; `generator` is that client's."""

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Take the steps of gradient descent, `[C, ...]` by parameter."""
        rates = learning_rates(block)
        steps: dict[str, list[Tensor]] = {name: [] for name in block.shared}
        for member in block.clients:
            users = self.users(block, generator_of(member.random))
            leaves = {
                name: block.parameters[name].clone().requires_grad_() for name in block.shared
            }
            loss = promotion_loss(target_scores(block, leaves, users))
            for name, gradient in gradients_of(loss, leaves).items():
                steps[name].append(-rates[name] * gradient)
        return {name: torch.stack(parts) for name, parts in steps.items()}


def promotion_loss(scores: Tensor) -> Tensor:
    """Mean cross-entropy `[]` of logits `[...]` as positives."""
    return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
