# SPDX-License-Identifier: Apache-2.0
"""A dot product: the mean embedding of the user's features times the item's embedding, plus the
item's bias."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.data.features import FeatureNames
from fedrec.models.base import Model, Parameters


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    embedding: int = Field(default=16, ge=1)
    """Width of the embeddings."""


class Example(Model):
    """Features of the user against the item's id."""

    Config = ExampleConfig
    # one row per item: a client gets and sends only the rows that it uses
    item_tables = ("item.id", "item.bias")
    config: ExampleConfig

    @classmethod
    def features_used(cls, config: ExampleConfig, known: FeatureNames) -> FeatureNames:
        """The side features that it uses, which tables of results state: those of the users."""
        return FeatureNames(users=known.users)

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh parameters, `float32`, a function of the generator."""
        items = self.schema.num_items
        width = self.config.embedding
        tables = {f"user.{name}": size for name, size in self.schema.user_features} | {
            "item.id": items
        }
        parameters = {
            name: 0.1 * torch.randn(size, width, generator=generator)
            for name, size in tables.items()
        }
        return parameters | {"user.all": torch.ones(width), "item.bias": torch.zeros(items, 1)}

    def predict(
        self,
        parameters: Parameters,
        users: tuple[Tensor, ...],
        items: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        """`[C, B]`: every parameter and every input has a leading dimension of C clients, which
        must not mix."""
        # in compact item tables, `rows` has the row of each item
        places = items if rows is None else rows
        user = parameters["user.all"]
        for (name, _), codes in zip(self.schema.user_features, users, strict=True):
            user = user + _mean_rows(parameters[f"user.{name}"], codes)
        client = torch.arange(len(places), device=places.device)[:, None]
        item = parameters["item.id"][client, places]
        bias = parameters["item.bias"][client, places, 0]
        return (item * user.unsqueeze(1)).sum(-1) + bias


def _mean_rows(table: Tensor, codes: Tensor) -> Tensor:
    """Mean of the rows of `[C, R, d]` that codes `int64 [C, w]` name, `[C, d]`; -1 names none."""
    known = (codes >= 0).to(table.dtype).unsqueeze(-1)
    client = torch.arange(len(codes), device=codes.device)[:, None]
    return (table[client, codes.clamp(min=0)] * known).sum(1) / known.sum(1).clamp(min=1)
