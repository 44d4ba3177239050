# SPDX-License-Identifier: Apache-2.0
"""Matrix factorization with biases (Koren, Bell and Volinsky 2009, equation 4), the items shared and the users private.

    r_ui = b + b_u + b_i + q_i . p_u

As a federated system (Ammad-ud-din et al. 2019; Chai et al. 2021): p_u and b_u are parameters that never leave the
device (`step.private-parameters = ["user.*"]`), the rest is shared. A device that was never in a round starts from the
shared values of p_u and b_u, which are equal for all and never change.

Where this differs from the papers: they solve for p_u or take one gradient step on it; here the local step's settings
say (`epochs`, `late-parameters`, `rates`). For ranking the same sum is a logit.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedrec.cohort.layers import gather_rows
from fedrec.config import Config
from fedrec.models.base import Model, Parameters


class MfConfig(Config):
    """Settings of matrix factorization."""

    factors: int = Field(default=16, ge=1)
    """Width of p_u and q_i."""
    std: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial factors."""
    center: float = 0.0
    """Initial value of b, such as the middle of the rating scale."""


class Mf(Model):
    """Factors and biases."""

    Config = MfConfig
    paper = "Koren et al. 2009, eq. 4"
    item_tables = ("item.factors", "item.bias")
    config: MfConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal factors, zero biases."""
        items, width, std = self.schema.num_items, self.config.factors, self.config.std
        return {
            "bias": torch.full((1,), self.config.center),
            "user.factors": torch.randn(width, generator=generator) * std,
            "user.bias": torch.zeros(1),
            "item.factors": torch.randn(items, width, generator=generator) * std,
            "item.bias": torch.zeros(items, 1),
        }

    def predict(
        self, parameters: Parameters, users: tuple[Tensor, ...], items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """See `Model.predict`; users' features are not looked at."""
        rows = items if rows is None else rows
        own = parameters["user.factors"].unsqueeze(-1)
        product = torch.bmm(gather_rows(parameters["item.factors"], rows), own)
        summed = (product + gather_rows(parameters["item.bias"], rows)).squeeze(-1)
        return summed + parameters["user.bias"] + parameters["bias"]
