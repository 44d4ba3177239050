# SPDX-License-Identifier: Apache-2.0
"""PIECK (Zhang et al. 2024): popular items are found by how far their embeddings have moved, and
the targets are promoted with these, without any knowledge of the data.

`ipe` (popularity enhancement) turns the targets' embeddings towards those of the popular items,
most weight on the most popular; `uea` (user approximation) takes the popular items' embeddings for
those of users and promotes the targets for them, for models in which both are in one space.

Where this differs from the paper: an item's movement is the distance of its embedding from its
initial value, which every client can compute, and not the sum over the first rounds that the client
takes part in, so that clients keep no state; popular items are found again in each round. In the
first round nothing has moved, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from clients.hosting.malicious import MaliciousBlock
from fedrec.errors import ExperimentError
from simulations.poisoning.base import UpdatePoisoning, UpdatePoisoningConfig
from simulations.poisoning.made_up_users import promotion_loss
from simulations.poisoning.promotion import embedding_tables, learning_rates


class PieckConfig(UpdatePoisoningConfig):
    """Settings of PIECK."""

    variant: Literal["ipe", "uea"] = "uea"
    """`ipe`: turn the targets towards popular items; `uea`: promote them for users that are
    approximated by these."""
    popular: int = Field(default=10, ge=1)
    """Number of popular items."""
    emphasis: float = Field(default=0.9, gt=0)
    """Factor on the mean similarities of `ipe` (tau)."""


class Pieck(UpdatePoisoning):
    """Promotes the targets by popular items that it finds itself.

    Raises:
        ExperimentError: the model has no table of item embeddings, or `uea` needs another model.
    """

    name = "pieck"
    Config = PieckConfig
    paper = "Zhang et al. 2024"
    config: PieckConfig

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Steps of gradient descent on the targets' embeddings, `[C, items, d]`, the same for
        all."""
        name = self._table(block)
        table = block.parameters[name]
        moved = (table - block.initial[name].to(table)).norm(dim=1)
        targets = torch.from_numpy(block.known.targets).to(table.device)
        moved[targets] = -1.0
        count = min(self.config.popular, len(moved) - len(targets))
        popular = moved.argsort(descending=True, stable=True)[:count]
        step = torch.zeros_like(table)
        if bool((moved[popular] > 0).any()):
            rows = table[targets].clone().requires_grad_()
            loss = self._loss(rows, table[popular])
            (gradient,) = torch.autograd.grad(loss, [rows])
            step[targets] = -learning_rates(block)[name] * gradient
        return {name: step.expand(len(block.clients), *step.shape)}

    def _loss(self, targets: Tensor, popular: Tensor) -> Tensor:
        """The loss of the targets' embeddings `[targets, d]`, given popular ones `[n, d]`."""
        if self.config.variant == "uea":
            return promotion_loss(popular @ targets.T)
        ranks = torch.arange(len(popular), 0, -1).to(popular)
        similar = F.cosine_similarity(popular[:, None], targets[None], dim=2)
        weighted = (ranks / ranks.sum())[:, None] * similar
        halves = [weighted[part] for part in (weighted > 0, weighted <= 0) if bool(part.any())]
        return -self.config.emphasis * sum((half.mean() for half in halves[1:]), halves[0].mean())

    def _table(self, block: MaliciousBlock) -> str:
        """The item table that it changes: the first with more than one column."""
        tables = embedding_tables(block)
        users = block.parameters.get("user.factors")
        same = bool(tables) and users is not None
        if not tables or (self.config.variant == "uea" and not same):
            raise ExperimentError(
                f"PIECK ({self.config.variant}) cannot attack {type(block.model).__name__}",
                expected="embeddings of items, for uea in the space of the users': model mf",
                got=", ".join(block.shared),
                fix="set adversary.attack = { name = 'pieck', variant = 'ipe' }, or model mf",
            )
        return tables[0]
