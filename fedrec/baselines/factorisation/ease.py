# SPDX-License-Identifier: Apache-2.0
"""EASE, the shallow linear autoencoder (Steck, Embarrassingly Shallow Autoencoders for Sparse Data,
WWW 2019).

With X the binary `[users, items]` matrix of positives and P = (X^T X + lambda I)^-1, the
item-to-item weights are B_ij = -P_ij / P_jj and B_jj = 0 (equation 8), and a user's scores are the
sum of the rows of B of the user's items. It has no user parameters, so it also scores users that it
was not fitted to.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines._ragged import sums
from fedrec.baselines.base import Baseline, Histories
from fedrec.config import Config
from fedrec.errors import ExperimentError

_USERS_AT_ONCE = 1024  # users per block of dense rows in memory
_MULTIPLICATIONS = 1e10  # per second, on two cores
_DENSE_MATRICES = 3  # Gram matrix, Cholesky factor and inverse live at the same time.


class EaseConfig(Config):
    """Settings of EASE."""

    regularisation: float = Field(500.0, gt=0)
    """Lambda, added to the diagonal of the Gram matrix, > 0; about 100 to 1000 for MovieLens."""
    max_items: int = Field(20_000, ge=1)
    """Largest catalogue to accept; the memory grows with its square (12 bytes per pair of
    items)."""


class Ease(Baseline):
    """Linear item-to-item model in closed form."""

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
        self._weights = item_weights(_gram(histories).to(self.device), self.config.regularisation)

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of the weights of each user's items, `float32 [users, items]`."""
        return sums(histories.distinct(), self._weights)

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


def item_weights(gram: torch.Tensor, regularisation: float) -> torch.Tensor:
    """B of a Gram matrix, `[items, items]`; the Gram matrix is used up.

    Args:
        gram: positive semi-definite `float [items, items]`.
        regularisation: lambda, > 0.
    """
    gram.diagonal().add_(regularisation)
    torch.linalg.cholesky(gram, out=gram)
    weights = torch.cholesky_inverse(gram)
    weights.div_(-weights.diagonal().clone())
    weights.fill_diagonal_(0.0)
    return weights.contiguous()  # LAPACK returns column-major memory; sums need rows


def _gram(histories: Histories) -> torch.Tensor:
    """X^T X, dense `float32 [items, items]`; time grows with positives x items, one block of users
    in memory."""
    gram = torch.zeros(histories.num_items, histories.num_items)
    for start in range(0, histories.num_users, _USERS_AT_ONCE):
        block = histories.block(start, min(start + _USERS_AT_ONCE, histories.num_users))
        gram += torch.sparse.mm(_sparse(block).t(), block.matrix())
    return gram


def _sparse(histories: Histories) -> torch.Tensor:
    """Binary sparse `float32 [users, items]`."""
    liked = histories.csr().tocoo()
    indices = torch.from_numpy(np.stack(liked.coords).astype(np.int64))
    return torch.sparse_coo_tensor(
        indices,
        torch.from_numpy(liked.data),
        liked.shape,
        is_coalesced=True,
        check_invariants=False,
    )
