# SPDX-License-Identifier: Apache-2.0
"""PrivRec's recommendation network (Wang et al. 2021, section 2.1, equations 1 and 2).

A user enters by side features only, never by an id, so that nothing shared identifies anyone and new users need no new
parameters. An item enters by its id and its features. The embeddings are joined, pass through hidden layers, and end in
one output.

Where this differs from the paper:

- Equation 1 has ReLU in the hidden layers, section 4.1 says sigmoid: `activation` chooses, ReLU by default.
- The widths of the four hidden layers are not given there; they default to 256, 128, 64, 32.
- The paper makes each of the 18 genres a one-hot feature of its own. Here a feature with several values (genres) has
  one embedding table, and an item's rows in it are averaged, so the input does not grow with the number of genres.
- f_u and f_v are embeddings alone, as algorithm 1 lists no other parameters (theta = {U, V, W, b}).
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedrec.cohort.layers import affine, gather_rows, pooled_rows
from fedrec.config import Config
from fedrec.models.base import Model, Parameters, Schema


class PrivRecConfig(Config):
    """Settings of PrivRec's network."""

    embedding: int = Field(default=64, ge=1)
    """Width of the embedding of each categorical feature (paper: 64)."""
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (256, 128, 64, 32)
    """Widths of the hidden layers (paper: four layers, widths not given)."""
    activation: Literal["relu", "sigmoid", "tanh"] = "relu"
    """Activation of the hidden layers."""
    embedding_std: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial embeddings."""


class PrivRec(Model):
    """The network of PrivRec, for implicit feedback (logits) and for ratings (linear output)."""

    Config = PrivRecConfig
    paper = "PrivRec (Wang et al. 2021), eq. 1-2"
    item_tables = ("item.id",)
    config: PrivRecConfig

    def __init__(self, config: PrivRecConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        self._item_codes = [(f"item.{f.name}", torch.from_numpy(f.padded())) for f in schema.item_features.features]
        self._activation = {"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}[config.activation]

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal embeddings, He-uniform (ReLU) or Glorot-uniform weights `[in, out]`, zero biases."""
        tables = {f"user.{name}": size for name, size in self.schema.user_features}
        tables["item.id"] = self.schema.num_items
        tables |= {f"item.{f.name}": len(f.categories) for f in self.schema.item_features.features}
        width, std = self.config.embedding, self.config.embedding_std
        parameters = {name: torch.randn(size, width, generator=generator) * std for name, size in tables.items()}
        widths = [width * len(tables), *self.config.hidden, 1]
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
            bound = math.sqrt(6 / fan_in if self.config.activation == "relu" else 6 / (fan_in + fan_out))
            uniform = torch.rand(fan_in, fan_out, generator=generator)
            parameters[f"layer{layer}.weight"] = (2 * uniform - 1) * bound
            parameters[f"layer{layer}.bias"] = torch.zeros(fan_out)
        return parameters

    def predict(
        self, parameters: Parameters, users: tuple[Tensor, ...], items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """See `Model.predict`. The first layer is applied to the user part once per client, not once per item."""
        names = [f"user.{name}" for name, _ in self.schema.user_features]
        user = [pooled_rows(parameters[name], codes) for name, codes in zip(names, users, strict=True)]
        item = [gather_rows(parameters["item.id"], items if rows is None else rows)]
        item += [pooled_rows(parameters[name], codes.to(items.device)[items]) for name, codes in self._item_codes]
        hidden = self._first_layer(parameters, user, torch.cat(item, -1))
        for layer in range(1, len(self.config.hidden) + 1):
            weight, bias = parameters[f"layer{layer}.weight"], parameters[f"layer{layer}.bias"].unsqueeze(1)
            hidden = affine(self._activation(hidden), weight, bias)
        return hidden.squeeze(-1)

    def _first_layer(self, parameters: Parameters, user: list[Tensor], item: Tensor) -> Tensor:
        weight, bias = parameters["layer0.weight"], parameters["layer0.bias"].unsqueeze(1)
        width = self.config.embedding * len(user)
        if user:
            bias = affine(torch.cat(user, -1).unsqueeze(1), weight, bias, slice(0, width))
        return affine(item, weight, bias, slice(width, None))
