# SPDX-License-Identifier: Apache-2.0
"""GF-CF (Shen et al., How Powerful is Graph Convolution for Recommendation?, CIKM 2021): two
filters on the graph of items, in closed form.

With R the `[users, items]` matrix of ones and zeros, D_U and D_I its row and column sums on the
diagonal, S = D_U^-1/2 R D_I^-1/2 and V the first right singular vectors of S,

    s_u = r_u (S^T S + alpha D_I^-1/2 V V^T D_I^1/2)

(their section 4.2): a linear filter, and an ideal low-pass filter. Nothing is trained. Users are
represented by their items only, so new users can be scored, too.
"""

import numpy as np
import torch
from pydantic import Field
from scipy import sparse

from fedrec.baselines.base import Baseline, Histories
from fedrec.baselines.factorisation.puresvd import right_singular_vectors
from fedrec.baselines.neighbourhood._sparse_product import dense_product
from fedrec.config import Width
from fedrec.data.low_rated import LowRatedConfig


class GfCfConfig(LowRatedConfig):
    """Settings of GF-CF."""

    factors: Width = 256
    """Number of singular vectors of the ideal low-pass filter, at most all."""
    alpha: float = Field(default=0.3, ge=0)
    """Weight of the ideal low-pass filter; with 0 the linear filter is alone, as in the authors'
    code for Amazon-Book."""


class GfCf(Baseline):
    """A linear filter and an ideal low-pass filter on the graph of items."""

    name = "gf-cf"
    Config = GfCfConfig
    paper = "Shen et al. 2021"
    config: GfCfConfig

    def fit(self, histories: Histories) -> None:
        """Normalise the matrix and find its singular vectors."""
        rows = histories.csr(np.float64, self.config.low_rated)
        users = _roots(rows.sum(1))
        items = _roots(rows.sum(0))
        shares = sparse.csr_array(
            sparse.diags_array(_inverse(users)) @ rows @ sparse.diags_array(_inverse(items))
        )
        self._filter = shares.astype(np.float32)
        if self.config.alpha:
            right = right_singular_vectors(shares, self.config.factors)
            self._into = (_inverse(items)[:, None] * right.T).astype(np.float32)
            self._out = torch.from_numpy((self.config.alpha * right * items).astype(np.float32))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Filtered histories, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        found = torch.from_numpy(
            dense_product(sparse.csr_array(rows @ self._filter.T), self._filter)
        )
        if self.config.alpha:
            found += torch.from_numpy(rows @ self._into) @ self._out
        return found


def _roots(sums: np.ndarray) -> np.ndarray:
    """Square roots of the sums of rows or columns, `float64 [n]`."""
    return np.sqrt(np.asarray(sums))


def _inverse(roots: np.ndarray) -> np.ndarray:
    """One over each, 0 for 0."""
    return np.where(roots > 0, 1 / np.where(roots > 0, roots, 1), 0)
