# SPDX-License-Identifier: Apache-2.0
"""A linear score function over item embeddings (Zhang et al. 2023, Dual Personalization on
Federated Recommendation).

There is no user embedding: what is personal is the score function, one weight per embedding column
and a bias.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.models.base import Model, Parameters


class LinearScoreConfig(Config):
    """Settings of the model."""

    embedding: int = Field(default=32, ge=1)
    """Width of the item embedding (paper's code: 32)."""
    embedding_std: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial item embeddings."""


class LinearScore(Model):
    """`score.weight . item + score.bias`."""

    Config = LinearScoreConfig
    paper = "PFedRec (Zhang et al. 2023)"
    item_tables = ("item.id",)
    config: LinearScoreConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal embeddings, a uniform score function."""
        width = self.config.embedding
        items = self.config.embedding_std * torch.randn(
            self.schema.num_items, width, generator=generator
        )
        weight = (2 * torch.rand(width, generator=generator) - 1) / math.sqrt(width)
        return {"item.id": items, "score.weight": weight, "score.bias": torch.zeros(1)}

    def predict(
        self,
        parameters: Parameters,
        users: tuple[Tensor, ...],
        items: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Predictions before the output activation. The users' features are not used."""
        places = items if rows is None else rows
        client = torch.arange(len(places), device=places.device)[:, None]
        own = parameters["item.id"][client, places]
        return (own * parameters["score.weight"].unsqueeze(1)).sum(-1) + parameters["score.bias"]
