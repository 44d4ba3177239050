# SPDX-License-Identifier: Apache-2.0
"""Explicit boosting (Zhang et al. 2022, PipAttack, section 3.3; the baseline EB of Rong, He and
Chen 2022): each malicious client raises its own predicted score of the targets.

The whole update is in the targets' rows of the item tables, in the direction of the gradient of the
score under the client's private parameters, and has the norm of an honest client's update times
`norm`.

Where this differs from the papers: their update is a step of gradient descent on the cross-entropy,
which vanishes once the score is high; here the norm is chosen, because that is what a server can
bound.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from clients.hosting.malicious import MaliciousBlock
from simulations.poisoning.base import UpdatePoisoning, UpdatePoisoningConfig
from simulations.poisoning.promotion import gradients_of, target_scores


class ExplicitBoostingConfig(UpdatePoisoningConfig):
    """Settings of explicit boosting."""

    norm: float | None = Field(default=1.0, gt=0)
    """L2 norm of each malicious update, in units of that of an honest client with a profile of
    random items."""


class ExplicitBoosting(UpdatePoisoning):
    """Moves the targets' embeddings towards higher scores."""

    name = "explicit-boosting"
    Config = ExplicitBoostingConfig
    paper = "Zhang et al. 2022; Rong, He and Chen 2022"

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Gradients of the targets' mean score in the targets' rows, `[C, ...]` by parameter."""
        tables = [name for name in block.model.item_tables if name in block.shared]
        found: dict[str, list[Tensor]] = {name: [] for name in tables}
        for place, trained in enumerate(block.honest):
            after = trained.parameters_of(0)
            own = {name: value for name, value in after.items() if name not in block.shared}
            leaves = {name: block.parameters[name].clone().requires_grad_() for name in tables}
            shared = {name: block.parameters[name] for name in block.shared} | leaves
            score = target_scores(block, shared, (own, block.features(place))).mean()
            for name, gradient in gradients_of(score, leaves).items():
                found[name].append(gradient)
        return {name: torch.stack(parts) for name, parts in found.items()}
