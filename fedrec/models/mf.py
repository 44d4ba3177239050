# SPDX-License-Identifier: Apache-2.0
"""Matrix factorization with biases, with users who are solved for on their devices, and NeuMF."""

import itertools
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedrec.config import Config, Width
from fedrec.data.interactions import Schema
from fedrec.errors import ExperimentError
from fedrec.models.base import INIT_STD, Model, Parameters, Users
from fedrec.nn import layers
from fedrec.nn.layers import KernelModel, Layer, Product

# Matrix factorization with biases (Koren, Bell and Volinsky 2009, equation 4), the items shared and
# the users private.
#
#     r_ui = b + b_u + b_i + q_i . p_u
#
# As a federated system (Ammad-ud-din et al. 2019; Chai et al. 2021): p_u and b_u are parameters
# that never leave the device (`step.private-parameters = ["user.*"]`), the rest is shared. A device
# that was never in a round starts from the shared values of p_u and b_u, which are equal for all
# and never change.
#
# Where this differs from the papers: they solve for p_u or take one gradient step on it; here the
# settings of the local step decide (`epochs`, `late-parameters`, `rates`). For ranking the same sum
# is a logit. What toolkits call "SVD" is this with biases, and "MF" without (`biases = false`).

_ITEMS_AT_ONCE = 32_768  # whose scores stay in cache until they are finished


class MfConfig(Config):
    """Settings of matrix factorization."""

    factors: Width = 16
    """Number of factors (width of p_u and q_i)."""
    center: float = 0.0
    """Initial value of b, such as the middle of the rating scale."""
    biases: bool = True
    """Whether the model has biases b, b_u and b_i; without them, a prediction is q_i . p_u."""

    @model_validator(mode="after")
    def _center_is_a_bias(self) -> Self:
        if self.center and not self.biases:
            raise ValueError(
                "center requires biases = true, because it is the initial value of a bias"
            )
        return self


class Mf(Model):
    """Matrix factorization: factors and biases."""

    name = "mf"
    Config = MfConfig
    paper = "Koren et al. 2009, eq. 4"
    item_tables = ("item.factors", "item.bias")
    config: MfConfig

    def __init__(self, config: MfConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        if not config.biases:
            # configuration of this model
            self.item_tables = ("item.factors",)  # type: ignore[misc]

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal factors, zero biases."""
        items = self.schema.num_items
        width = self.config.factors
        drawn = {
            "bias": torch.full((1,), self.config.center),
            "user.factors": torch.randn(width, generator=generator) * INIT_STD,
            "user.bias": torch.zeros(1),
            "item.factors": torch.randn(items, width, generator=generator) * INIT_STD,
            "item.bias": torch.zeros(items, 1),
        }
        return {
            name: value
            for name, value in drawn.items()
            if self.config.biases or name.endswith("factors")
        }

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. Users' features are not used."""
        rows = items if rows is None else rows
        user = parameters["user.factors"].unsqueeze(-1)
        product = torch.bmm(layers.gather_rows(parameters["item.factors"], rows), user)
        if not self.config.biases:
            return product.squeeze(-1)
        summed = (product + layers.gather_rows(parameters["item.bias"], rows)).squeeze(-1)
        return summed + parameters["user.bias"] + parameters["bias"]

    def scores(self, parameters: Parameters, users: Users) -> Tensor:
        """Scores of the whole catalogue, `[C, num_items]`; one product where clients share the
        factors of items."""
        table = parameters["item.factors"]
        if len(table) > 1 and table.stride(0):
            return super().scores(parameters, users)
        scores = table.new_empty(len(parameters["user.factors"]), table.shape[1])
        for start in range(0, table.shape[1], _ITEMS_AT_ONCE):
            items = slice(start, start + _ITEMS_AT_ONCE)
            products = parameters["user.factors"] @ table[0, items].T
            if self.config.biases:
                products += parameters["item.bias"][:, items, 0]
                products += parameters["user.bias"]
                products += parameters["bias"]
            scores[:, items] = products
        return scores

    def kernel(self) -> KernelModel:
        """Declaration for native code: q_i . p_u is one layer without features, with weight p_u."""
        return KernelModel(
            layers=(Layer("user.factors"),),
            activation="identity",
            loss="logistic" if self.schema.task == "ranking" else "squared",
            item_table="item.factors",
            item_bias="item.bias" if self.config.biases else None,
            offsets=("user.bias", "bias") if self.config.biases else (),
        )


# Implicit matrix factorization whose users are solved for on their devices (FCF, Ammad-ud-din et
# al. 2019).
#
#     score(u, i) = x_u . y_i
#
# The item factors y_i are shared. A device solves for its own x_u (Hu, Koren and Volinsky 2008),
# which never leaves it, and sends sums from which the server updates the item factors (step `als`,
# strategies `fcf` and `fed-als`). These sums are represented as parameters, which are zero on the
# server before every round:
#
#     user.gram     x_u x_u^T
#     item.right    one row per item that the user likes
#     item.moments  x_u x_u^T again, for each item that the user likes; only where `moments` says so
#     item.products the products of all of a user's items, once; only where `products` says so
#
# The Gram matrix Y^T Y is sent with the item factors (`item.gram`), so that a device needs only the
# rows of its own items.
#
# Where this differs from the paper: there, devices hold the whole item matrix and send a gradient
# for each item; here, the same sum is computed from what is sent for liked items and a matrix of
# `factors`^2 numbers.

_MOST_ITEMS = 20_000  # whose products take 1.6 GB


class IalsConfig(Config):
    """Settings of implicit matrix factorization."""

    factors: Width = 64
    """Number of factors d (width of x_u and y_i)."""
    spread: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial item factors, times the root of their width."""
    moments: bool = False
    """Whether clients send second moments for each of their items, d (d + 1) / 2 numbers, which
    `fed-als` needs."""
    products: bool = False
    """Whether clients send the products of their items once, as a change of `item.products`, the
    square of the catalogue, from which `gram-start` starts; for up to 20,000 items."""


class Ials(Model):
    """Implicit matrix factorization: shared item factors and one user's factors.

    Raises:
        ExperimentError: the catalogue is too large for `products`.
    """

    name = "ials"
    Config = IalsConfig
    paper = "FCF (Ammad-ud-din et al. 2019); Hu et al. 2008"
    item_tables = ("item.factors", "item.right")
    config: IalsConfig

    def __init__(self, config: IalsConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        if config.moments:
            # Of this model
            self.item_tables = ("item.factors", "item.right", "item.moments")  # type: ignore[misc]

        if config.products and schema.num_items > _MOST_ITEMS:
            raise ExperimentError(
                "the catalogue is too large for products of all items",
                expected=f"at most {_MOST_ITEMS:,} items",
                got=f"{schema.num_items:,}",
                fix="set model.products = false, and strategy.name = 'fed-als' without a start",
            )

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal item factors and their Gram matrix; zeros for the user and for all sums."""
        items = self.schema.num_items
        width = self.config.factors
        factors = torch.randn(items, width, generator=generator) * (self.config.spread / width**0.5)
        drawn = {
            "item.factors": factors,
            "item.gram": factors.T @ factors,
            "user.factors": torch.zeros(width),
            "user.gram": torch.zeros(width, width),
            "item.right": torch.zeros(items, width),
        }
        if self.config.moments:
            drawn["item.moments"] = torch.zeros(items, width * (width + 1) // 2)
        if self.config.products:
            drawn["item.products"] = torch.zeros(items, items)
        return drawn

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. Users' features are not used."""
        rows = items if rows is None else rows
        user = parameters["user.factors"].unsqueeze(-1)
        return torch.bmm(layers.gather_rows(parameters["item.factors"], rows), user).squeeze(-1)

    def scores(self, parameters: Parameters, users: Users) -> Tensor:
        """Scores of the whole catalogue, `[C, num_items]`, without a copy of the item factors."""
        user = parameters["user.factors"].unsqueeze(-1)
        return torch.bmm(parameters["item.factors"], user).squeeze(-1)


# NeuMF as a federated model (FedNCF, Perifanis and Efraimidis 2022; He et al. 2017): users' rows
# stay on devices.
#
#     logit(u, i) = h . [p_u * q_i ; tower([p'_u ; q'_i])] + b
#
# with ReLU behind each layer of the tower. p_u and p'_u are one user's, private
# (`step.private-parameters = ["user.*"]`); items' rows, tower and h are shared. A device that was
# never in a round starts from the shared values of its rows, which are equal for all and never
# change. Without a tower it is GMF, without factors MLP.
#
# Where this differs from the paper: items' rows of the product and of the tower are two tables, as
# in He et al.


class NeumfConfig(Config):
    """Settings of NeuMF."""

    factors: int = Field(default=16, ge=0, le=2**16)
    """Number of factors (width of the product); 0: no product."""
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
        """Normal rows, Glorot-uniform layers `[in, out]`, zero biases."""
        config = self.config
        parameters = dict[str, Tensor]()
        widths = {"factors": config.factors, "tower": config.tower[0] // 2 if config.tower else 0}
        for part, width in widths.items():
            if width:
                parameters[f"user.{part}"] = torch.randn(width, generator=generator) * INIT_STD
                rows = torch.randn(self.schema.num_items, width, generator=generator)
                parameters[f"item.{part}"] = rows * INIT_STD
        for layer, (before, after) in enumerate(itertools.pairwise(config.tower)):
            parameters[f"tower{layer}.weight"] = layers.glorot(before, after, generator)
            parameters[f"tower{layer}.bias"] = torch.zeros(after)
        last = config.factors + (config.tower[-1] if config.tower else 0)
        return parameters | {
            "output.weight": layers.glorot(last, 1, generator),
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
            item_rows = layers.gather_rows(parameters["item.factors"], rows)
            total = total + layers.single_output(item_rows, product.unsqueeze(-1))
        if config.tower:
            parts = [
                [parameters["user.tower"].unsqueeze(1)],
                [layers.gather_rows(parameters["item.tower"], rows)],
            ]
            weights = [parameters[f"tower{layer}.weight"] for layer in self._layers]
            biases = [parameters[f"tower{layer}.bias"] for layer in self._layers]
            hidden = layers.perceptron(parts, weights, biases, "relu").view(*rows.shape, -1).relu()
            total = total + layers.single_output(hidden, weight[:, config.factors :])
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
