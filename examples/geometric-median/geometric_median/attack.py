# SPDX-License-Identifier: Apache-2.0
"""Malicious clients that send the opposite of what they learned, magnified: an untargeted attack of
the kind that robust rules are usually tried against."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from clients.malicious import MaliciousBlock
from simulations.poisoning import UpdatePoisoning, UpdatePoisoningConfig


class SignFlipConfig(UpdatePoisoningConfig):
    """Settings of the attack."""

    factor: float = Field(default=5.0, gt=0)
    """How many times as large as the honest update the opposite is."""


class SignFlip(UpdatePoisoning):
    """Sends minus the update of honest training on random items."""

    Config = SignFlipConfig
    config: SignFlipConfig

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """The updates, `[C, ...]` by parameter."""
        changes = [one.changes_of(0) for one in block.honest]
        return {
            name: -self.config.factor * torch.stack([own[name] for own in changes])
            for name in block.shared
        }
