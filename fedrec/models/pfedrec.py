# SPDX-License-Identifier: Apache-2.0
"""PFedRec's model (Zhang et al. 2023): shared item embeddings, and a score function of each user's
own.

    logit(u, i) = w_u . v_i + b_u

There is no user embedding: the score function is personal and never leaves the device (step
`pfedrec`).
"""

import math

import torch
from torch import Tensor

from fedrec.config import Config, Width
from fedrec.models.base import INIT_STD, Model, Parameters, Users
from fedrec.nn.declaration import KernelModel, Layer
from fedrec.nn.layers import gather_rows, single_output


class PfedrecConfig(Config):
    """Settings of the model."""

    embedding: Width = 32
    """Width of the item embeddings (paper's code: 32)."""


class Pfedrec(Model):
    """Item embeddings under a linear score function."""

    name = "pfedrec"
    Config = PfedrecConfig
    paper = "PFedRec (Zhang et al. 2023)"
    item_tables = ("item.id",)
    config: PfedrecConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal embeddings, a uniform score function without offset."""
        width = self.config.embedding
        items = INIT_STD * torch.randn(self.schema.num_items, width, generator=generator)
        weight = (2 * torch.rand(width, 1, generator=generator) - 1) / math.sqrt(width)
        return {"item.id": items, "score.weight": weight, "score.bias": torch.zeros(1)}

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. Users' features are not used."""
        own = gather_rows(parameters["item.id"], items if rows is None else rows)
        return single_output(own, parameters["score.weight"]) + parameters["score.bias"]

    def kernel(self) -> KernelModel:
        """The declaration for native code: one layer on the item's embedding."""
        return KernelModel(
            layers=(Layer("score.weight", "score.bias"),),
            activation="identity",
            loss="logistic" if self.schema.task == "ranking" else "squared",
            item_table="item.id",
        )
