# SPDX-License-Identifier: Apache-2.0
"""Item-based nearest neighbours (Sarwar et al. 2001; Deshpande and Karypis 2004) on what users
like.

An item's score is the sum of its similarities to those of its nearest items that the user likes.
Users are represented by their items only, so new users can be scored too.
"""

import numpy as np
import torch

from fedrec.baselines.base import Baseline, Histories
from fedrec.baselines.neighbourhood._sparse_product import dense_product
from fedrec.baselines.neighbourhood.similarity import NeighbourConfig, nearest


class ItemKnnConfig(NeighbourConfig):
    """Settings of item-based nearest neighbours."""


class ItemKnn(Baseline):
    """Scores an item by the likes among its nearest items."""

    name = "item-knn"
    Config = ItemKnnConfig
    paper = "Deshpande and Karypis 2004"
    config: ItemKnnConfig

    def fit(self, histories: Histories) -> None:
        """Find each item's nearest items."""
        items = histories.csr(low_rated=self.config.low_rated).T.tocsr()
        self._similar = nearest(
            items, items.T.tocsr(), self.config, np.arange(histories.num_items)
        ).T.tocsr()

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of similarities, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return torch.from_numpy(dense_product(rows, self._similar))
