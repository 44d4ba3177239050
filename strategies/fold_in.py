# SPDX-License-Identifier: Apache-2.0
"""Item embeddings from the sum of the clients' products, public features and popularity, to which
each device fits its user's taste (model `fold-in`).

    [strategy]
    name = "popularity-start"
    step = { name = "counts", low-rated = 0.3 }
    estimate = "posterior-mean"
    main = { name = "fold-in" }

Two rounds, in which every client uploads once each: its counts, which choose the items of the
second round and tell how popular all are, and its products of those items (step `gram`). The server
needs the sums alone. It takes what popularity and public features explain from the sum of the
products; the leading eigenvectors of the rest are further coordinates of the items
(`fedrec.factors.residual`). Under noise those below the noise edge are left out. That is
post-processing and costs no privacy, and neither do tastes, which never leave the devices.

With every client in both rounds this is the centralised baseline `dp-fold-in`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fedrec.factors.chosen_items import BIAS
from fedrec.factors.residual import LearnedConfig, placed_embeddings
from fedrec.models.fold_in import LEARNED, PRODUCTS, PUBLIC
from strategies._products import Products, ProductsStrategy


class FoldInStrategyConfig(LearnedConfig):
    """Settings of the learned coordinates; their largest number is the model's `factors`."""


class FoldInStrategy(ProductsStrategy):
    """Sums the products and computes the items' learned coordinates."""

    name = "fold-in"
    Config = FoldInStrategyConfig
    paper = "fold-in of iALS (Hu et al. 2008) and EASE's Gram matrix (Steck 2019), from one release"
    products = PRODUCTS
    model = "fold-in"
    config: FoldInStrategyConfig

    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """The learned coordinates of all items, `float32 [items, factors]`."""
        shares = torch.softmax(torch.from_numpy(theta[BIAS][:, 0].astype(np.float64)), 0)
        learned = placed_embeddings(
            products.gram,
            products.chosen,
            products.scale,
            shares,
            torch.from_numpy(theta[PUBLIC].astype(np.float64)),
            self.config,
            edge=products.edge,
            factors=theta[LEARNED].shape[1],
        )
        return {LEARNED: learned.float().numpy()}
