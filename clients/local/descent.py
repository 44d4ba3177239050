# SPDX-License-Identifier: Apache-2.0
"""Gradient descent on one client's parameters, in place: the reference for training in blocks."""

from __future__ import annotations

from pydantic import Field

from clients.step import StepConfig
from fedrec.cohort.sgd import SgdSettings


class DescentConfig(StepConfig):
    """Settings of steps with mini-batch gradient descent."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Learning rate (alpha1 in PrivRec)."""
    batch_size: int = Field(default=32, ge=1)
    """Examples per gradient step; the last batch of an epoch may be smaller."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Heavy-ball momentum; starts at zero in every round."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty added to the gradient."""
    proximal_mu: float = Field(default=0.0, ge=0)
    """Weight of FedProx's proximal term; a server may also send it as `proximal-mu`."""

    def sgd(self) -> SgdSettings:
        """The settings for training in blocks."""
        return SgdSettings(self.learning_rate, self.momentum, self.weight_decay, self.proximal_mu)
