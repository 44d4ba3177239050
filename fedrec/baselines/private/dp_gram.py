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

from typing import Literal

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines.base import Histories
from fedrec.baselines.private._chosen_items import CountsAndGramBaseline, CountsAndGramConfig
from fedrec.config import Width
from fedrec.data.features import FeatureNames
from fedrec.errors import ExperimentError
from fedrec.factors.gram import noise_edge, solved_weights
from fedrec.factors.subspace import basis_of, denoised_within, public_directions


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


class DpGram(CountsAndGramBaseline):
    """EASE or PureSVD from a noisy Gram matrix of the items with the largest noisy counts."""

    name = "dp-gram"
    Config = DpGramConfig
    paper = "EASE (Steck 2019), PureSVD (Cremonesi et al. 2010), each from one Gaussian release"
    config: DpGramConfig

    @classmethod
    def features_used(cls, config: DpGramConfig, known: FeatureNames) -> FeatureNames:
        """Those of the items with `public-features`."""
        return FeatureNames(items=known.items if config.public_features else ())

    def fit(self, histories: Histories) -> None:
        """Release counts and Gram matrix, and solve for the item-to-item weights.

        Raises:
            ExperimentError: `public-features`, and the items have none.
        """
        config = self.config
        gram, std = self.released(histories)
        edge = noise_edge(std, len(gram))
        regularisation = config.regularisation
        if config.public_features:
            gram = denoised_within(gram, std, self._basis(histories))
            regularisation += config.ridge * edge
            edge = 0.0
        weights = solved_weights(
            gram,
            edge,
            solution=config.model,
            factors=config.factors,
            regularisation=regularisation,
            ridge=config.ridge,
        )
        scale = torch.from_numpy(self.chosen.weights).to(self.device)
        self._item_weights = (scale[:, None] * weights / scale).float()

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of the weights of each user's items, `float32 [users, items]`."""
        known = torch.from_numpy(self.rows(histories)[:, self.chosen.places].toarray())
        return self.chosen.ranked(known.to(self._item_weights) @ self._item_weights)

    def _basis(self, histories: Histories) -> torch.Tensor:
        """Orthonormal basis of the directions spanned by the popularities and public features of
        the selected items."""
        if histories.item_features is None or not histories.item_features.features:
            raise ExperimentError(
                "there are no public features to denoise with",
                expected="a dataset whose items have features",
                got="none",
                fix="set public-features = false for this baseline",
            )
        chosen = self.chosen
        counts = np.maximum(chosen.counts[chosen.places], chosen.noise)
        directions = public_directions(histories.item_features)[chosen.places]
        return basis_of(directions, counts * chosen.weights).to(self.device)
