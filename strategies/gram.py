# SPDX-License-Identifier: Apache-2.0
"""A linear item-to-item model from the sum of the clients' products: EASE or PureSVD in one round.

    B_ij = -P_ij / P_jj,    P = (G + lambda I)^-1,    G = sum over clients of (D x)(D x)^T

(Steck 2019, equation 8). With every client in the round and no noise the weights are those of the
centralised EASE or PureSVD.

    [strategy]
    name = "popularity-start"
    main = { name = "gram" }

counts the items first. The most popular items then have weights and the others follow in the order
of their popularity, which is necessary for catalogues of more than the model's `items`.

Where this differs from the papers: they solve it centrally. Under noise the eigenvalues below the
noise edge are cut first, and lambda grows with it (`fedrec.factors.gram`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from fedrec.config import Config, Width
from fedrec.factors.gram import Solution, solved_weights
from fedrec.models.item_weights import WEIGHTS
from strategies._products import Products, ProductsStrategy


class GramStrategyConfig(Config):
    """Settings of the linear model."""

    solution: Solution = "ease"
    """`ease`, or `puresvd`, which keeps the leading eigenvectors and is more robust to noise."""
    regularisation: float = Field(default=300.0, gt=0)
    """Regularisation lambda of `ease`, > 0; about 100 to 1000."""
    factors: Width = 12
    """Largest number of eigenvectors of `puresvd`; those below the noise edge are dropped in any
    case."""
    ridge: float = Field(default=1.0, ge=0)
    """Amount added to lambda under noise, in units of the noise edge."""


class GramStrategy(ProductsStrategy):
    """Sums the products and solves for the weights."""

    name = "gram"
    Config = GramStrategyConfig
    paper = "EASE (Steck 2019), equation 8"
    products = WEIGHTS
    model = "item-weights"
    config: GramStrategyConfig

    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """The weights, in the items' own scale, `float32 [items, items]` of the chosen items."""
        config = self.config
        scale = products.scale
        weights = solved_weights(
            products.gram,
            products.edge,
            solution=config.solution,
            factors=config.factors,
            regularisation=config.regularisation,
            ridge=config.ridge,
        )
        return {WEIGHTS: (scale[:, None] * weights / scale).float().numpy()}
