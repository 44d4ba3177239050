# SPDX-License-Identifier: Apache-2.0
"""User-based nearest neighbours (Herlocker et al. 1999) on what users like.

An item's score is the sum of the similarities of those of the user's nearest training users who
like it. A user who was among the training users is not a neighbour of itself; any other user is
compared with them by its known items. The fitted model contains the training users' items, so it is
not private.
"""

import torch
from pydantic import Field

from fedrec.baselines.base import Baseline, Histories
from fedrec.baselines.neighbourhood._sparse_product import dense_product
from fedrec.baselines.neighbourhood.similarity import NeighbourConfig, nearest


class UserKnnConfig(NeighbourConfig):
    """Settings of user-based nearest neighbours."""

    neighbours: int = Field(default=100, ge=1)
    """Number of neighbours (training users)."""


class UserKnn(Baseline):
    """Scores an item by its likes among the nearest users."""

    name = "user-knn"
    Config = UserKnnConfig
    paper = "Herlocker et al. 1999"
    config: UserKnnConfig

    def fit(self, histories: Histories) -> None:
        """Keep the training users' items."""
        self._fitted = histories
        self._liked = histories.csr(low_rated=self.config.low_rated)
        self._columns = self._liked.T.tocsr()

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of neighbours' similarities, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        weights = nearest(rows, self._columns, self.config, self._fitted.places(histories))
        return torch.from_numpy(dense_product(weights, self._liked))
