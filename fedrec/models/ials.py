# SPDX-License-Identifier: Apache-2.0
"""Implicit matrix factorization whose users are solved for on their devices (FCF, Ammad-ud-din et
al. 2019).

    score(u, i) = x_u . y_i

The item factors y_i are shared. A device solves for its own x_u (Hu, Koren and Volinsky 2008),
which never leaves it, and sends sums from which the server updates the item factors (step `als`,
strategies `fcf` and `fed-als`). These sums are represented as parameters, which are zero on the
server before every round:

    user.gram     x_u x_u^T
    item.right    one row per item that the user likes
    item.moments  x_u x_u^T again, for each item that the user likes; only where `moments` says so
    item.products the products of all of a user's items, once; only where `products` says so

The Gram matrix Y^T Y is sent with the item factors (`item.gram`), so that a device needs only the
rows of its own items.

Where this differs from the paper: there, devices hold the whole item matrix and send a gradient for
each item; here, the same sum is computed from what is sent for liked items and a matrix of
`factors`^2 numbers.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config, Width
from fedrec.data.schema import Schema
from fedrec.errors import ExperimentError
from fedrec.models.base import Model, Parameters, Users
from fedrec.nn.layers import gather_rows

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
    """Shared item factors and one user's factors.

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
                "the catalogue is too large for products of all of its items",
                expected=f"at most {_MOST_ITEMS:,} items",
                got=f"{schema.num_items:,}",
                fix="set model.products = false, and strategy.name = 'fed-als' without a start",
            )
        if config.products:
            self.products = "item.products"  # type: ignore[misc]

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
        own = parameters["user.factors"].unsqueeze(-1)
        return torch.bmm(gather_rows(parameters["item.factors"], rows), own).squeeze(-1)

    def scores(self, parameters: Parameters, users: Users) -> Tensor:
        """Scores of the whole catalogue, `[C, num_items]`, without a copy of the item factors."""
        own = parameters["user.factors"].unsqueeze(-1)
        return torch.bmm(parameters["item.factors"], own).squeeze(-1)
