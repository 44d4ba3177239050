# SPDX-License-Identifier: Apache-2.0
"""A linear item-to-item model from one noisy Gram matrix: EASE or PureSVD under user-level
differential privacy.

Two releases, once each, without training rounds:

1. noisy counts of likers (`dp-popularity`), which select the m items whose entries can exceed the
   noise, and give their weights;
2. the Gram matrix of those items, G = sum_u a_u (D x_u)(D x_u)^T with a_u = min(1, c / |D x_u|^2),
   so that each user contributes a positive semi-definite matrix of Frobenius norm at most c. D is
   diagonal, the noisy counts to the power of minus `exponent`: popular items have the largest
   entries and would otherwise dominate the norm.

Both are sums over users, so two uploads per user under secure aggregation would suffice, the second
with m (m + 1) / 2 numbers. Contributions of both are non-negative, so under replace-one both cost
sqrt(2) S and not 2 S (`fedrec.privacy.adjacency`).

What follows is post-processing. Noise alone has eigenvalues up to about s sqrt(2 m), the noise
edge, where s is its standard deviation on the diagonal (the semicircle law); eigenvalues below it
are set to zero. Then either

* `ease`: EASE's closed form (Steck 2019) with lambda = regularisation + ridge x noise edge, or
* `puresvd`: scores x D V V^T D^-1 with V the leading eigenvectors (Cremonesi, Koren and Turrin
  2010).

With `public-features` the matrix is first denoised with the items' public features
(`fedrec.factors.subspace`); `ridge` refers to the same noise edge.

Without noise, with c and m large and `exponent = 0` these are EASE and PureSVD. Items that were not
selected are ranked last, by their noisy counts.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines._ragged import among, sums
from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation._gram import noise_edge, solved_weights
from fedrec.baselines.private._clipped_rows import binary_rows
from fedrec.baselines.private._counts_and_gram import CountsAndGramConfig, count_weights
from fedrec.baselines.private._private import Part, PrivateBaseline
from fedrec.baselines.private.dp_popularity import clipped_counts
from fedrec.config import Width
from fedrec.errors import ExperimentError
from fedrec.factors.subspace import basis_of, denoised_within, public_directions
from fedrec.privacy.clipping import Clip

_USERS_AT_ONCE = 1024  # users per block of dense rows in memory


class DpGramConfig(CountsAndGramConfig):
    """Settings of the noisy Gram matrix."""

    model: Literal["ease", "puresvd"] = "puresvd"
    """Model that is computed from the noisy Gram matrix."""
    factors: Width = 12
    """Largest number of eigenvectors of `puresvd`; those below the noise edge are dropped in any
    case, and those just above it are mostly noise."""
    public_features: bool = False
    """Whether the matrix is denoised with the items' public features: directions in which
    popularities and features vary are much more robust to noise (`fedrec.factors.subspace`)."""
    ridge: float = Field(default=1.0, ge=0)
    """Lambda of `ease` in units of the noise edge."""
    regularisation: float = Field(default=1.0, gt=0)
    """Constant part of lambda, > 0; without noise, lambda."""


class DpGram(PrivateBaseline):
    """EASE or PureSVD from a noisy Gram matrix of the items with the largest noisy counts."""

    Config = DpGramConfig
    paper = "EASE (Steck 2019), PureSVD (Cremonesi et al. 2010), each from one Gaussian release"
    config: DpGramConfig

    def parts(self) -> tuple[Part, ...]:
        """The counts, and the Gram matrix."""
        return self.config.releases()

    def fit(self, histories: Histories) -> None:
        """Release counts and Gram matrix, and solve for the item-to-item weights."""
        histories, releases = histories.distinct(), self.releases(histories.num_users)
        plans = releases.plans
        counts = releases.release("counts", clipped_counts(histories, plans["counts"].clip))
        self._chosen = np.sort(np.argsort(-counts, kind="stable")[: self.config.items])
        self._scale = count_weights(
            counts[self._chosen], plans["counts"].noise_scale, self.config.exponent
        )
        total = weighted_gram(
            among(histories, self._chosen), self._scale, plans["gram"].clip, self.device
        )
        gram = torch.from_numpy(releases.symmetric("gram", total)).to(self.device).double()
        std = plans["gram"].noise_scale
        edge = noise_edge(std, len(gram))
        if self.config.public_features:
            known = np.maximum(counts[self._chosen], plans["counts"].noise_scale)
            gram = denoised_within(gram, std, self._basis(histories, known))
        self._item_weights = self._solved(gram, edge).float()
        # Below every chosen item, between 0 and 1 apart.
        below = (counts - counts.max()) / max(float(np.ptp(counts)), 1e-9) - 1
        self._others = torch.from_numpy(below).to(self.device).float()

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of the weights of each user's items, `float32 [users, items]`."""
        found = sums(among(histories.distinct(), self._chosen), self._item_weights)
        scores = found.amin(1, keepdim=True) + self._others
        scores[:, torch.from_numpy(self._chosen).to(self.device)] = found
        return scores

    def _basis(self, histories: Histories, counts: np.ndarray) -> torch.Tensor:
        """Orthonormal basis of the directions spanned by the popularities and public features of
        the selected items.

        Raises:
            ExperimentError: the items have no public features.
        """
        if histories.item_features is None or not histories.item_features.features:
            raise ExperimentError(
                "there are no public features to denoise with",
                expected="a dataset whose items have features",
                got="none",
                fix="set public-features = false for this baseline",
            )
        directions = public_directions(histories.item_features)[self._chosen]
        return basis_of(directions, counts * self._scale).to(self.device)

    def _solved(self, gram: torch.Tensor, edge: float) -> torch.Tensor:
        """Item-to-item weights from a noisy Gram matrix, with item weights divided out."""
        config = self.config
        denoised = config.public_features
        weights = solved_weights(
            gram,
            0.0 if denoised else edge,
            solution=config.model,
            factors=config.factors,
            regularisation=config.regularisation + (config.ridge * edge if denoised else 0.0),
            ridge=config.ridge,
        )
        scale = torch.from_numpy(self._scale).to(self.device)
        return scale[:, None] * weights / scale


def weighted_gram(
    histories: Histories, scale: np.ndarray, clip: Clip, device: torch.device
) -> np.ndarray:
    """Sum of the users' clipped matrices, `float64 [items, items]`.

    Args:
        histories: each item at most once per user.
        scale: weight of each item, > 0.
        clip: bound on the Frobenius norm of a user's matrix.
        device: device for the computation.
    """
    squared_norms = np.bincount(
        histories.rows(), weights=scale[histories.items] ** 2, minlength=histories.num_users
    )
    shares = np.sqrt(clip.factors(squared_norms))
    gram = torch.zeros(histories.num_items, histories.num_items, dtype=torch.float64, device=device)
    start = 0
    for rows in binary_rows(histories, _USERS_AT_ONCE, device):
        own = shares[start : start + len(rows), None]
        start = start + len(rows)
        weighted = rows * torch.from_numpy(own).to(device)
        gram.addmm_(weighted.T, weighted)
    return gram.cpu().numpy() * scale[:, None] * scale
