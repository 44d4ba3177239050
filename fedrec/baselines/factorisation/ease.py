# SPDX-License-Identifier: Apache-2.0
"""EASE, the shallow linear autoencoder (Steck, Embarrassingly Shallow Autoencoders for Sparse Data,
WWW 2019).

With X the `[users, items]` matrix of positives, of ones and zeros, and P = (X^T X + lambda I)^-1,
the item-to-item weights are B_ij = -P_ij / P_jj and B_jj = 0 (equation 8), and a user's scores are
the sum of the rows of B of the user's items. It has no user parameters, so it also scores users
that it was not fitted to. With `low-rated`, X has that weight for rated items that are not
positive, in the Gram matrix and in the histories that are scored.
"""

import torch
from pydantic import Field

from fedrec.baselines.base import Baseline, Histories
from fedrec.baselines.neighbourhood._sparse_product import dense_product
from fedrec.data.low_rated import LowRatedConfig
from fedrec.errors import ExperimentError
from fedrec.factors.gram import item_weights

_MULTIPLICATIONS = 1e10  # per second, on two cores
_DENSE_MATRICES = 3  # Gram matrix, Cholesky factor and inverse live at the same time.


class EaseConfig(LowRatedConfig):
    """Settings of EASE."""

    regularisation: float = Field(500.0, gt=0)
    """Lambda, added to the diagonal of the Gram matrix, > 0; about 100 to 1000 for MovieLens."""
    max_items: int = Field(20_000, ge=1)
    """Largest catalogue to accept; the memory grows with its square (12 bytes per pair of
    items)."""


class Ease(Baseline):
    """Linear item-to-item model in closed form."""

    name = "ease"
    Config = EaseConfig
    paper = "Steck 2019"
    stand_in = "ials"
    config: EaseConfig

    def fit(self, histories: Histories) -> None:
        """Solve for the item-to-item weights.

        Raises:
            ExperimentError: the catalogue is larger than `max-items`.
        """
        reason = self.too_large(histories.num_users, histories.num_items)
        if reason:
            raise ExperimentError(
                "the catalogue is too large for EASE",
                expected=f"at most {self.config.max_items} items",
                got=reason,
                fix="leave EASE out, or raise its max-items if the machine has that much",
            )
        rows = histories.csr(low_rated=self.config.low_rated)
        gram = torch.from_numpy(dense_product(rows.T.tocsr(), rows)).to(self.device)
        self._weights = item_weights(gram, self.config.regularisation)

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of the weights of each user's items, `float32 [users, items]`."""
        return histories.sums(self._weights, self.config.low_rated)

    def too_large(self, num_users: int, num_items: int) -> str:
        """Why data of this size cannot be fitted, in a few words; empty: they can."""
        if num_items <= self.config.max_items:
            return ""
        minutes = num_items**3 / _MULTIPLICATIONS / 60
        gibibytes = _DENSE_MATRICES * 4 * num_items**2 / 2**30
        return (
            f"{num_items} items would take about {gibibytes:.1f} GiB and, on two cores, about"
            f" {minutes:.0f} min; max-items is {self.config.max_items}"
        )
