# SPDX-License-Identifier: Apache-2.0
"""A model of transitions between items from the sum of the clients' own, in one round
(`fedrec.factors.transitions`).

With every client in the round and no noise the weights are those of the centralised `transitions`.
With `popularity-start` the most popular items have weights:

    [strategy]
    name = "popularity-start"
    main = { name = "transitions" }

Under noise the sum is a matrix of low rank plus noise: singular values below the noise edge are cut
and the others shrunk (Gavish and Donoho 2017, square matrices, Frobenius norm), and then the scale
of the items is taken out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedrec.config import Width
from fedrec.factors.transitions import SmoothingConfig, transition_weights
from fedrec.models.item_weights import WEIGHTS
from strategies._products import Products, ProductsStrategy


class TransitionsStrategyConfig(SmoothingConfig):
    """Settings of the weights."""

    factors: Width = 12
    """Largest number of singular vectors under noise; those below the noise edge are dropped in any
    case."""


class TransitionsStrategy(ProductsStrategy):
    """Sums the transitions and normalises them."""

    name = "transitions"
    Config = TransitionsStrategyConfig
    paper = "a smoothed Markov chain; FPMC (Rendle et al. 2010) without factors"
    products = WEIGHTS
    model = "transitions"
    sender = "transitions"
    symmetric = False
    config: TransitionsStrategyConfig

    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """The weights, `float32 [items, items]` of the chosen items."""
        total = _denoised(products.gram, products.edge, self.config.factors)
        total = total / products.scale[:, None] / products.scale
        return {WEIGHTS: transition_weights(total, self.config).float().numpy()}


def _denoised(total: Tensor, edge: float, limit: int) -> Tensor:
    """The matrix without what its noise may be; itself where there is no noise."""
    if edge == 0:
        return total
    left, values, right = torch.linalg.svd(total, full_matrices=False)
    kept = (values.square() - edge**2).clamp(min=0).sqrt()[:limit]
    return (left[:, :limit] * kept) @ right[:limit]
