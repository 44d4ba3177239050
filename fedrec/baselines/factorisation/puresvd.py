# SPDX-License-Identifier: Apache-2.0
"""PureSVD (Cremonesi, Koren and Turrin 2010): the best low-rank approximation of who likes what.

With X the `[users, items]` matrix of ones and zeros and V its first right singular vectors, scores
are X V V^T (their equation 8). Only V is fitted, so new users can be scored from their items. With
`low-rated`, X has that weight for rated items that are not positive.
"""

from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import svds

from fedrec.baselines.base import Baseline, Histories, Sparse
from fedrec.config import Width
from fedrec.data.low_rated import LowRatedConfig
from fedrec.rng import stream

# below, and at nearly full rank, where it does not converge, Lanczos iteration does not pay
_DENSE_CELLS = 100_000


class PuresvdConfig(LowRatedConfig):
    """Settings of PureSVD."""

    factors: Width = 50
    """Number of singular vectors, at most all."""


class Puresvd(Baseline):
    """Projects a user's items on the first right singular vectors."""

    name = "puresvd"
    Config = PuresvdConfig
    paper = "Cremonesi et al. 2010"
    config: PuresvdConfig

    def fit(self, histories: Histories) -> None:
        """Find the singular vectors, by Lanczos iteration in float64."""
        rows = histories.csr(np.float64, self.config.low_rated)
        right = right_singular_vectors(rows, self.config.factors)
        self._items = torch.from_numpy(right.T.astype(np.float32))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Histories after the projection, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return torch.from_numpy(rows @ self._items.numpy()) @ self._items.T


def right_singular_vectors(rows: Sparse, number: int) -> np.ndarray:
    """The right singular vectors of the largest singular values, `float64 [number, columns]`, of a
    sparse matrix `float64 [rows, columns]`; at most all."""
    rank = min(number, *rows.shape)
    if rows.shape[0] * rows.shape[1] <= _DENSE_CELLS or 2 * rank > min(rows.shape):
        return np.linalg.svd(rows.toarray(), full_matrices=False)[2][:rank]
    start = stream(0, "baseline-puresvd").normal(size=min(rows.shape))
    only: Any = "vh"
    return np.asarray(svds(rows, rank, v0=start, return_singular_vectors=only)[2])
