# SPDX-License-Identifier: Apache-2.0
"""What A-ra and A-hum share: the gradient of the targets' loss for made-up users."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from clients.hosting.malicious import MaliciousBlock
from simulations.poisoning.base import UpdatePoisoning, UpdatePoisoningConfig
from simulations.poisoning.promotion import (
    Users,
    generator_of,
    gradients_of,
    learning_rates,
    target_scores,
)


class MadeUpUsersConfig(UpdatePoisoningConfig):
    """Settings of attacks with made-up users."""

    users: int = Field(default=10, ge=1)
    """Number of users that each malicious client makes up in a round."""
    user_std: float = Field(default=0.01, gt=0)
    """Standard deviation of their private parameters."""


class MadeUpUsers(UpdatePoisoning):
    """One step of gradient descent, with the learning rates of honest clients, on the cross-entropy
    of the targets as positives of made-up users; every shared parameter moves."""

    Config = MadeUpUsersConfig
    config: MadeUpUsersConfig

    @abstractmethod
    def users(self, block: MaliciousBlock, generator: torch.Generator) -> Users:
        """The users that one client makes up; `generator` is its own."""

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """The steps of gradient descent, `[C, ...]` by parameter."""
        rates = learning_rates(block)
        found: dict[str, list[Tensor]] = {name: [] for name in block.shared}
        for member in block.clients:
            users = self.users(block, generator_of(member.random))
            leaves = {
                name: block.parameters[name].clone().requires_grad_() for name in block.shared
            }
            loss = promotion_loss(target_scores(block, leaves, users))
            for name, gradient in gradients_of(loss, leaves).items():
                found[name].append(-rates[name] * gradient)
        return {name: torch.stack(parts) for name, parts in found.items()}


def promotion_loss(scores: Tensor) -> Tensor:
    """Mean cross-entropy `[]` of logits `[...]` as positives."""
    return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
