# SPDX-License-Identifier: Apache-2.0
"""A-hum (Rong, He and Chen 2022, section 4.3): as A-ra, but for hard users, who do not like the
targets.

A random user is made hard by steps of gradient descent on its private parameters, on the
cross-entropy of the targets as negatives.

Where this differs from the paper: of models that represent users by features alone, hard users are
those with the lowest scores among ten times as many random ones.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch.nn import functional as F

from clients.hosting.malicious import MaliciousBlock
from simulations.poisoning.made_up_users import MadeUpUsers, MadeUpUsersConfig
from simulations.poisoning.promotion import Users, made_up_users, target_scores

_CANDIDATES = 10  # random users for each hard one, where there are no private parameters


class HardUsersConfig(MadeUpUsersConfig):
    """Settings of A-hum."""

    hard_steps: int = Field(default=30, ge=1)
    """Steps of gradient descent that make a user hard."""
    hard_rate: float = Field(default=0.001, gt=0)
    """Their learning rate."""


class HardUserMining(MadeUpUsers):
    """Promotes the targets for users who do not like them."""

    name = "a-hum"
    Config = HardUsersConfig
    paper = "Rong, He and Chen 2022, A-hum"
    config: HardUsersConfig

    def users(self, block: MaliciousBlock, generator: torch.Generator) -> Users:
        """Hard users."""
        config = self.config
        private = len(block.shared) < len(block.parameters)
        count = config.users if private else _CANDIDATES * config.users
        own, features = made_up_users(block, count, config.user_std, generator)
        shared = {name: block.parameters[name] for name in block.shared}
        if not private:
            scores = target_scores(block, shared, (own, features)).detach().mean(1)
            hardest = scores.argsort(stable=True)[: config.users]
            return own, tuple(codes[hardest] for codes in features)
        for _ in range(config.hard_steps):
            leaves = {name: value.detach().requires_grad_() for name, value in own.items()}
            scores = target_scores(block, shared, (leaves, features))
            # each user is trained alone, so the loss is a sum over users
            loss = F.binary_cross_entropy_with_logits(
                scores, torch.zeros_like(scores), reduction="none"
            )
            gradients = torch.autograd.grad(loss.mean(1).sum(), list(leaves.values()))
            moved = zip(own.items(), gradients, strict=True)
            own = {name: value - config.hard_rate * step for (name, value), step in moved}
        return own, features
