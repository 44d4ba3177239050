# SPDX-License-Identifier: Apache-2.0
"""FedRAP's model (Li, Long and Zhou, ICLR 2024): an item's embedding is the sum of a shared and a
personal part.

    logit(u, i) = w_u . (c_i + d_ui) + b_u

C (`item.id`) is shared. D_u (`item.personal`), w_u and b_u are one user's and never leave the
device (step `fedrap`). D_u has a row for every item, but is not a compact item table: each device
holds it whole.

Where this differs from the paper's public code: D starts at zero and not at random, so that a user
who was never in a round is ranked by the shared part only.
"""

import math

import torch
from torch import Tensor

from fedrec.config import Config, Width
from fedrec.models.base import INIT_STD, Model, Parameters, Users
from fedrec.nn.layers import gather_rows, single_output


class FedrapConfig(Config):
    """Settings of the model."""

    embedding: Width = 32
    """Width of both parts of an item's embedding (paper's code: 32)."""


class Fedrap(Model):
    """Shared and personal item embeddings, added, under a linear score function."""

    name = "fedrap"
    Config = FedrapConfig
    paper = "FedRAP (Li et al. 2024), section 3"
    item_tables = ("item.id",)
    config: FedrapConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """A normal shared part, no personal one, a uniform score function without offset."""
        items = self.schema.num_items
        width = self.config.embedding
        shared = INIT_STD * torch.randn(items, width, generator=generator)
        weight = (2 * torch.rand(width, 1, generator=generator) - 1) / math.sqrt(width)
        return {
            "item.id": shared,
            "item.personal": torch.zeros(items, width),
            "score.weight": weight,
            "score.bias": torch.zeros(1),
        }

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. Users' features are not used."""
        shared = gather_rows(parameters["item.id"], items if rows is None else rows)
        added = shared + gather_rows(parameters["item.personal"], items)
        return single_output(added, parameters["score.weight"]) + parameters["score.bias"]
