# SPDX-License-Identifier: Apache-2.0
"""Item embeddings from public features and one noisy Gram matrix; each device fits its own user
vector.

Two releases, once each, under user-level differential privacy:

1. noisy counts, which select the m items of the second release and estimate the popularity of all;
2. the Gram matrix of those m items, as in `dp-gram`.

A user's row x holds 1 for each liked item and `low-rated` for each other item that it rated: a user
chose the films that it rated, which also tells something about its preferences. Both releases are
sums over users of non-negative vectors and of positive semi-definite matrices of bounded norm, so
replacing a user costs sqrt(2) S (`fedrec.privacy.adjacency`).

Item embeddings are public in part, factors of a kernel over genres and years
(`fedrec.factors.public`), and learned in part, the leading eigenvectors of the part of the noisy
Gram matrix that popularity and public embeddings do not explain (`fedrec.factors.residual`). That
is post-processing and costs no privacy.

A device receives popularity and embeddings, and computes the most probable vector of its user
(`fedrec.factors.log_linear`) from the user's own rows. This happens on the device and nothing of it
is sent, so it costs no privacy either.

The parts are the fold-in of iALS (Hu et al. 2008: a new user's vector from fixed item vectors), DP
popularity, and EASE from a noisy Gram matrix; their combination is ours. Item features have to be
public, such as film titles and genres; user features are not used.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field
from scipy import sparse

from fedrec.baselines.base import Histories, Sparse
from fedrec.baselines.factorisation._gram import noise_edge
from fedrec.baselines.private._counts_and_gram import CountsAndGramConfig, count_weights
from fedrec.baselines.private._private import Part, PrivateBaseline
from fedrec.data.features import FeatureTable
from fedrec.factors.log_linear import LogLinear
from fedrec.factors.public import PublicPriorConfig, feature_embeddings
from fedrec.factors.residual import LearnedConfig, expected_counts, placed_embeddings
from fedrec.privacy.clipping import Clip


class DpFoldInConfig(CountsAndGramConfig, LearnedConfig, PublicPriorConfig):
    """Settings of the releases, of the public embeddings and of the learned ones."""

    low_rated: float = Field(default=0.3, ge=0, le=1)
    """Weight of a rated item that is not positive, in the releases and on the device; 0 ignores
    these items."""
    items: int = Field(default=600, ge=1)
    """Number m of items (with the largest noisy counts) in the Gram matrix; at most the
    catalogue."""
    count_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the budget (of mu^2) that the counts take."""
    factors: int = Field(default=64, ge=0, le=2**16)
    """Largest number of learned coordinates; those below the noise edge are dropped in any case."""


class DpFoldIn(PrivateBaseline):
    """User vectors fitted on the device to item embeddings that are public or released once."""

    Config = DpFoldInConfig
    paper = "fold-in of iALS (Hu et al. 2008) and EASE's Gram matrix (Steck 2019), from one release"
    config: DpFoldInConfig

    def parts(self) -> tuple[Part, ...]:
        """The counts, and the Gram matrix."""
        return self.config.releases()

    def fit(self, histories: Histories) -> None:
        """Release counts and Gram matrix, and compute embeddings from them and public features.

        Raises:
            ExperimentError: an ordered feature is not an item feature.
        """
        config = self.config
        rows = rated_rows(histories, self.config.low_rated)
        releases = self.releases(histories.num_users)
        counts_plan, gram_plan = (releases.plans[name] for name in ("counts", "gram"))
        noisy = releases.release("counts", clipped_row_sum(rows, counts_plan.clip))
        chosen = np.sort(np.argsort(-noisy, kind="stable")[: config.items])
        scale = count_weights(noisy[chosen], counts_plan.noise_scale, config.exponent)
        total = clipped_gram(rows[:, chosen] * scale, gram_plan.clip)
        gram = torch.from_numpy(releases.symmetric("gram", total)).double()
        counts = expected_counts(noisy, counts_plan.noise_scale)
        shares = torch.from_numpy(counts / counts.sum())
        features = histories.item_features or FeatureTable(histories.num_items)
        public = torch.from_numpy(feature_embeddings(features, config))
        learned = placed_embeddings(
            gram,
            torch.from_numpy(chosen),
            torch.from_numpy(scale),
            shares,
            public,
            config,
            edge=noise_edge(gram_plan.noise_scale, len(gram)),
            factors=config.factors,
        )
        embeddings = torch.cat([public, learned], 1).float().to(self.device)
        self._model = LogLinear(embeddings, shares.log().float().to(self.device))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores from each user's vector, fitted to its own rows, `float32 [users, items]`."""
        rows = rated_rows(histories, self.config.low_rated).toarray()
        return self._model.scores(torch.from_numpy(rows).float().to(self.device))


def rated_rows(histories: Histories, low_rated: float) -> Sparse:
    """The users' rows, sparse `float64 [users, items]`: 1 for liked items, a weight for other rated
    items, 0 elsewhere.

    Args:
        histories: the users' liked and other rated items.
        low_rated: the weight, in [0, 1]; an item that is also liked has weight 1.
    """
    liked = histories.csr(np.float64)
    if histories.low_rated is None or low_rated == 0:
        return liked
    return sparse.csr_array(liked.maximum(low_rated * histories.low_rated.csr(np.float64)))


def clipped_row_sum(rows: Sparse, clip: Clip) -> np.ndarray:
    """Sum of users' rows, each clipped in L2, `float64 [items]`; rows are `[users, items]`."""
    return rows.T @ clip.factors(np.sqrt(_squared_norms(rows)))


def clipped_gram(rows: Sparse, clip: Clip) -> np.ndarray:
    """Sum over users of x x^T, each clipped in the Frobenius norm |x|^2, `float64 [items, items]`.

    Args:
        rows: x of each user, sparse `float64 [users, items]`.
        clip: the bound.
    """
    shares = np.sqrt(clip.factors(_squared_norms(rows)))
    shrunk = sparse.diags_array(shares) @ rows
    return (shrunk.T @ shrunk).toarray()


def _squared_norms(rows: Sparse) -> np.ndarray:
    """`float64 [users]`."""
    return np.asarray(rows.multiply(rows).sum(1)).ravel()
