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

import torch
from pydantic import Field

from fedrec.baselines.base import Histories
from fedrec.baselines.private._chosen_items import CountsAndGramBaseline, CountsAndGramConfig
from fedrec.data.features import FeatureNames, FeatureTable
from fedrec.factors.gram import noise_edge
from fedrec.factors.log_linear import LogLinear
from fedrec.factors.public import PublicPriorConfig, feature_embeddings, prior_features
from fedrec.factors.residual import LearnedConfig, expected_counts, placed_embeddings


class DpFoldInConfig(CountsAndGramConfig, LearnedConfig, PublicPriorConfig):
    """Settings of the releases, of the public embeddings and of the learned ones."""

    low_rated: float = Field(default=0.3, ge=0, le=1)
    """Weight of a rated item that is not positive, in the releases and on the device, where a
    positive one has 1; 0 leaves these items out."""
    items: int = Field(default=600, ge=1)
    """Number m of items (with the largest noisy counts) in the Gram matrix; at most the
    catalogue."""
    count_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the budget (of mu^2) that the counts take."""
    factors: int = Field(default=64, ge=0, le=2**16)
    """Largest number of learned coordinates; those below the noise edge are dropped in any case."""


class DpFoldIn(CountsAndGramBaseline):
    """User vectors fitted on the device to item embeddings that are public or released once."""

    name = "dp-fold-in"
    Config = DpFoldInConfig
    paper = "fold-in of iALS (Hu et al. 2008) and EASE's Gram matrix (Steck 2019), from one release"
    config: DpFoldInConfig

    @classmethod
    def features_used(cls, config: DpFoldInConfig, known: FeatureNames) -> FeatureNames:
        """Those of the items; no texts or vectors whose effects have no variance."""
        return prior_features(config, known)

    def fit(self, histories: Histories) -> None:
        """Release counts and Gram matrix, and compute embeddings from them and public features.

        Raises:
            ExperimentError: an ordered feature is not an item feature.
        """
        config = self.config
        gram, std = self.released(histories)
        gram = gram.cpu()
        counts = expected_counts(self.chosen.counts, self.chosen.noise)
        shares = torch.from_numpy(counts / counts.sum())
        features = histories.item_features or FeatureTable(histories.num_items)
        public = torch.from_numpy(feature_embeddings(features, config))
        learned = placed_embeddings(
            gram,
            torch.from_numpy(self.chosen.places),
            torch.from_numpy(self.chosen.weights),
            shares,
            public,
            config,
            edge=noise_edge(std, len(gram)),
            factors=config.factors,
        )
        embeddings = torch.cat([public, learned], 1).float().to(self.device)
        self._model = LogLinear(embeddings, shares.log().float().to(self.device))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores from each user's vector, fitted to its own rows, `float32 [users, items]`."""
        rows = torch.from_numpy(self.rows(histories).toarray())
        return self._model.scores(rows.float().to(self.device))
