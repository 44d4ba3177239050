# SPDX-License-Identifier: Apache-2.0
"""FedGNN's model (Wu et al. 2021): graph attention over a user's items and over those who share
them.

    x_i    = e_i + attention of item i over p_u and its neighbouring users' embeddings
    h_u    = p_u + attention of p_u over the x_i of the user's items
    logit(u, j) = h_u . e_j

The graph is local to a device: its items, and for each of them embeddings of other users that a
third party found. p_u (`user.id`) and h_u (`user.vector`) are never sent to the server; a device
computes h_u in each of its rounds (step `fedgnn`) and ranks by the last one. A device that has
never been in a round has no h_u and cannot rank.

Where this differs from the paper, which predicts ratings: a score is the inner product, and an
item's own embedding is added to the aggregated ones. Its public code weights neighbours by
attention without a softmax, which is used here.
"""

import torch
from torch import Tensor

from fedrec.config import Config, Width
from fedrec.graphs.attention import attended
from fedrec.models.base import INIT_STD, Model, Parameters, Users
from fedrec.nn.layers import gather_rows


class FedgnnConfig(Config):
    """Settings of the model."""

    embedding: Width = 16
    """Width of all embeddings (paper: 256)."""


class Fedgnn(Model):
    """Item embeddings, and a user vector computed from a local graph."""

    name = "fedgnn"
    Config = FedgnnConfig
    paper = "FedGNN (Wu et al. 2021), section 3.2"
    item_tables = ("item.id",)
    config: FedgnnConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal embeddings, Glorot-uniform layers `[in, out]`; no vector yet."""
        width = self.config.embedding
        found = {
            "item.id": INIT_STD * torch.randn(self.schema.num_items, width, generator=generator),
            "user.id": INIT_STD * torch.randn(width, generator=generator),
            "user.vector": torch.zeros(width),
        }
        for layer in ("items", "users"):
            square = 2 * torch.rand(width, width, generator=generator) - 1
            found[f"{layer}.weight"] = square * (3 / width) ** 0.5
            for end in ("source", "target"):
                drawn = 2 * torch.rand(width, generator=generator) - 1
                found[f"{layer}.{end}"] = drawn * (6 / (width + 1)) ** 0.5
        return found

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. Users' features are not used."""
        embedded = gather_rows(parameters["item.id"], items if rows is None else rows)
        return torch.bmm(embedded, parameters["user.vector"].unsqueeze(-1)).squeeze(-1)

    def vector(
        self, parameters: Parameters, liked: Tensor, real: Tensor, near: Tensor, there: Tensor
    ) -> Tensor:
        """h_u `[C, d]` of each user.

        Args:
            parameters: `[C, ...]` each.
            liked: `[C, n, d]`, embeddings of the user's items.
            real: `bool [C, n]`, which of these are not padding.
            near: `[C, n, k, d]`, embeddings of other users with each of these items.
            there: `bool [C, n, k]`, which of these are not padding.
        """
        user = parameters["user.id"].unsqueeze(1)
        own = user.unsqueeze(1).expand(*liked.shape[:2], 1, -1)
        known = torch.cat([real.unsqueeze(-1), there], -1)
        sources = torch.cat([own, near], 2)
        items = liked + attended(liked, sources, known, *_layer(parameters, "items"))
        taken = attended(user, items.unsqueeze(1), real.unsqueeze(1), *_layer(parameters, "users"))
        return (user + taken).squeeze(1)


def _layer(parameters: Parameters, name: str) -> tuple[Tensor, Tensor, Tensor]:
    weight, source, target = (parameters[f"{name}.{p}"] for p in ("weight", "source", "target"))
    return weight, source, target
