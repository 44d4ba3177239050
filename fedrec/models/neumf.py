# SPDX-License-Identifier: Apache-2.0
"""NeuMF as a federated model (FedNCF, Perifanis and Efraimidis 2022; He et al. 2017): users' rows
stay on devices.

    logit(u, i) = h . [p_u * q_i ; tower([p'_u ; q'_i])] + b

with ReLU behind each layer of the tower. p_u and p'_u are one user's, private
(`step.private-parameters = ["user.*"]`); items' rows, tower and h are shared. A device that was
never in a round starts from the shared values of its rows, which are equal for all and never
change. Without a tower it is GMF, without factors MLP.

Where this differs from the paper: items' rows of the product and of the tower are two tables, as in
He et al.
"""

import itertools
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedrec.config import Config, Width
from fedrec.data.interactions import Schema
from fedrec.models.base import INIT_STD, Model, Parameters, Users
from fedrec.nn.layers import (
    KernelModel,
    Layer,
    Product,
    gather_rows,
    glorot,
    kaiming,
    perceptron,
    single_output,
)


class NeumfConfig(Config):
    """Settings of NeuMF."""

    factors: int = Field(default=16, ge=0, le=2**16)
    """Number of factors (width of the product); 0: no product."""
    init_std: float = Field(default=INIT_STD, gt=0)
    """Standard deviation of initial factors and embeddings."""
    layers: Literal["glorot", "kaiming"] = "glorot"
    """Initial weights of layers: uniform of variance 2 / (inputs + outputs), or 2 / inputs, which
    preserves the size of signals through ReLU (He et al. 2015)."""
    tower: tuple[Width, ...] = (32, 16, 8)
    """Widths of the tower: of the two embeddings together (even), and of each layer; empty: no
    tower."""

    @model_validator(mode="after")
    def _has_a_part(self) -> Self:
        if not self.factors and not self.tower:
            raise ValueError("set factors or tower")
        if self.tower and (len(self.tower) < 2 or self.tower[0] % 2):
            raise ValueError("tower needs an even width and at least one layer")
        return self


class Neumf(Model):
    """NeuMF: a product of factors and a tower of layers, concatenated."""

    name = "neumf"
    Config = NeumfConfig
    paper = "FedNCF (Perifanis and Efraimidis 2022); He et al. 2017"
    config: NeumfConfig

    def __init__(self, config: NeumfConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        parts = (["factors"] if config.factors else []) + (["tower"] if config.tower else [])
        # Of this model, not its class
        self.item_tables = tuple(f"item.{part}" for part in parts)  # type: ignore[misc]
        self._layers = range(max(0, len(config.tower) - 1))

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal rows, uniform layers `[in, out]`, zero biases."""
        config = self.config
        parameters = dict[str, Tensor]()
        start = glorot if config.layers == "glorot" else kaiming
        widths = {"factors": config.factors, "tower": config.tower[0] // 2 if config.tower else 0}
        for part, width in widths.items():
            if width:
                parameters[f"user.{part}"] = (
                    torch.randn(width, generator=generator) * config.init_std
                )
                rows = torch.randn(self.schema.num_items, width, generator=generator)
                parameters[f"item.{part}"] = rows * config.init_std
        for layer, (before, after) in enumerate(itertools.pairwise(config.tower)):
            parameters[f"tower{layer}.weight"] = start(before, after, generator)
            parameters[f"tower{layer}.bias"] = torch.zeros(after)
        last = config.factors + (config.tower[-1] if config.tower else 0)
        return parameters | {
            "output.weight": start(last, 1, generator),
            "output.bias": torch.zeros(1),
        }

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. Users' features are not used."""
        rows = items if rows is None else rows
        config = self.config
        weight = parameters["output.weight"]
        total = parameters["output.bias"]
        if config.factors:
            product = parameters["user.factors"] * weight[:, : config.factors, 0]
            item_rows = gather_rows(parameters["item.factors"], rows)
            total = total + single_output(item_rows, product.unsqueeze(-1))
        if config.tower:
            parts = [
                [parameters["user.tower"].unsqueeze(1)],
                [gather_rows(parameters["item.tower"], rows)],
            ]
            weights = [parameters[f"tower{layer}.weight"] for layer in self._layers]
            biases = [parameters[f"tower{layer}.bias"] for layer in self._layers]
            hidden = perceptron(parts, weights, biases, "relu").view(*rows.shape, -1).relu()
            total = total + single_output(hidden, weight[:, config.factors :])
        return total

    def kernel(self) -> KernelModel | None:
        """Declaration for native code; None without a tower."""
        if not self.config.tower:
            return None
        tower = (Layer(f"tower{layer}.weight", f"tower{layer}.bias") for layer in self._layers)
        return KernelModel(
            layers=(*tower, Layer("output.weight", "output.bias")),
            activation="relu",
            loss="logistic" if self.schema.task == "ranking" else "squared",
            item_table="item.tower",
            user_rows=("user.tower",),
            product=Product("user.factors", "item.factors") if self.config.factors else None,
        )
