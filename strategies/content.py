# SPDX-License-Identifier: Apache-2.0
"""A linear model with a map from items' content to its factors, from one sum of the clients'
products.

    [strategy]
    name = "popularity-start"
    main = { name = "content-map" }

Two rounds, in which every client uploads once each: its counts, which choose the items of the
second round, and its products of those items (step `gram`): the sum that strategies `gram` and
`fold-in` release, so that the guarantee is theirs. Factors and map are post-processing of it and of
public columns (`fedrec.sums.content`). Under noise eigenvalues below the noise edge are left out,
and items that were not chosen have factors by their content, as new ones do.

With every client in both rounds, all items chosen and no noise this is the centralised baseline
`content-map`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.errors import ExperimentError
from fedrec.models.content import LEFT, MAP, RIGHT
from fedrec.models.linear import PRODUCTS, PUBLIC
from fedrec.sums.content import MapConfig, mapped
from fedrec.sums.products import Solution, above_edge, solved_weights
from strategies.sums import Products, ProductsStrategy


class ContentMapStrategyConfig(MapConfig):
    """Settings of the model and of the map; the number of factors is the model's."""

    solution: Solution = "puresvd"
    """The model of the chosen items: `puresvd`, or `ease`, which needs as many factors in the model
    as there are chosen items."""
    regularisation: float = Field(default=500.0, gt=0)
    """Lambda of `ease`, > 0."""


class ContentMapStrategy(ProductsStrategy):
    """Sums the products, and solves for factors and for the map from content to them."""

    name = "content-map"
    Config = ContentMapStrategyConfig
    paper = "attribute-to-feature mappings (Gantner et al. 2010), from one release"
    products = PRODUCTS
    model = "content-map"
    config: ContentMapStrategyConfig

    def check_parameters(self, theta: Mapping[str, np.ndarray]) -> None:
        """Refuse a model without such factors, or with too few of them."""
        super().check_parameters(theta)
        wide = self.config.solution == "ease"
        if MAP not in theta or (wide and theta[LEFT].shape[1] < len(theta[PRODUCTS])):
            raise ExperimentError(
                "the model has no factors that the strategy 'content-map' could compute",
                expected="model.name = 'content-map'"
                + (", with as many factors as items" if wide else ""),
                got=", ".join(f"{name} {list(value.shape)}" for name, value in theta.items()),
                fix="set model.name = 'content-map'"
                + (" and a larger model.factors" if wide else ""),
            )

    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """Factors of all items, `float32 [items, factors]`, and the map."""
        width = theta[LEFT].shape[1]
        # an item's own product is the number of its users, under noise of this deviation
        std = products.edge / (2 * len(products.gram)) ** 0.5
        used = products.gram.diagonal() > std
        scale = products.scale[:, None]
        left, right = self._factors(products, width)
        model = mapped(
            scale * left,
            right / scale,
            products.chosen,
            used,
            torch.from_numpy(theta[PUBLIC]),
            self.config.map_regularisation,
        )
        values = {LEFT: model.left, RIGHT: model.right, MAP: model.weights}
        return {name: _padded(value, width).numpy() for name, value in values.items()}

    def _factors(self, products: Products, width: int) -> tuple[Tensor, Tensor]:
        """L and R of the chosen items in their scale, `float64 [m, factors]`."""
        if self.config.solution == "puresvd":
            vectors = above_edge(products.gram, products.edge, width)[1]
            return vectors, vectors
        weights = solved_weights(
            products.gram,
            products.edge,
            solution="ease",
            factors=0,
            regularisation=self.config.regularisation,
            ridge=1.0,
        )
        return torch.eye(len(weights), dtype=weights.dtype), weights.T


def _padded(values: Tensor, width: int) -> Tensor:
    """`float32 [n, width]`, zeros behind the columns `[n, fewer]`."""
    return F.pad(values, (0, width - values.shape[1])).float()
