# SPDX-License-Identifier: Apache-2.0
"""A log-linear model of what users like, whose taste each device fits to its own rows.

    p(i) proportional to exp(b_i + w . e_i),  w ~ N(0, I)

The items' popularities b and embeddings e are shared. A user's taste w is none of the parameters:
the device finds the most probable one given its user's rows (`fedrec.factors.log_linear`), as iALS
folds in a new user with fixed item vectors (Hu et al. 2008). It is found anew whenever the user is
ranked for, never sent and never kept, so it serves anybody with a history and has no training of
its own.

    item.bias      popularities, as `popularity-start` finds them
    item.public    coordinates from public features, which stay as they are
    item.learned   coordinates that strategy `fold-in` learns from the sum of the users' products
    item.products  what users' products are sent as a change of; zero on the server

In a history, an item that a user rated and that is not positive counts `low-rated`: who rated a
film had chosen it, which says something of its taste, too.
"""

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Width
from fedrec.data.features import FeatureNames
from fedrec.factors.chosen_items import BIAS
from fedrec.factors.log_linear import LogLinear
from fedrec.factors.public import PublicPriorConfig, feature_embeddings, prior_features
from fedrec.models.base import Parameters, ProductsConfig, ProductsModel

PUBLIC = "item.public"
LEARNED = "item.learned"
PRODUCTS = "item.products"


class FoldInConfig(PublicPriorConfig, ProductsConfig):
    """Settings of the embeddings and of users' histories."""

    items: int | None = Field(default=600, ge=1, le=20_000)
    """m, the number of most popular items that products are about; at most the catalogue. Memory
    grows with its square: 600 items take 1.4 MB."""
    factors: Width = 64
    """Largest number of learned coordinates."""
    low_rated: float = Field(default=0.3, ge=0, le=1)
    """Weight of a rated item that is not positive in a user's history, where a positive one has 1;
    0 leaves these items out. Of no use where the data have no ratings."""


class FoldIn(ProductsModel):
    """Embeddings of items, public and learned, and tastes that devices fit."""

    name = "fold-in"
    Config = FoldInConfig
    paper = "fold-in of iALS (Hu et al. 2008), features as a Gaussian prior"
    products = PRODUCTS
    config: FoldInConfig

    @property
    def low_rated(self) -> float:
        """What an item has in histories that a user rated and that is not positive."""
        return self.config.low_rated

    @classmethod
    def features_used(cls, config: FoldInConfig, known: FeatureNames) -> FeatureNames:
        """Those of the items; no texts or vectors whose effects have no variance."""
        return prior_features(config, known)

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Public coordinates, of which there is at least one column, and zeros; nothing is drawn.

        Raises:
            ExperimentError: an ordered feature is none of the items'.
        """
        items = self.schema.num_items
        public = torch.from_numpy(feature_embeddings(self.schema.item_features, self.config))
        return {
            BIAS: torch.zeros(items, 1),
            PUBLIC: public.float() if public.shape[1] else torch.zeros(items, 1),
            LEARNED: torch.zeros(items, self.config.factors),
            PRODUCTS: torch.zeros(self.size, self.size),
        }

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Logarithms of each user's popularities after its taste was fitted to its history, up to a
        constant, `[C, B, items]`."""
        return self.scorer(parameters)(histories)

    def scorer(self, parameters: Parameters, *, traced: bool = False) -> Callable[[Tensor], Tensor]:
        """See `HistoryModel.scorer`; the embeddings are decomposed before."""
        slices = zip(*(parameters[name] for name in (BIAS, PUBLIC, LEARNED)), strict=True)
        fitted = [_fitted(*own) for own in slices]
        scores = LogLinear.traced_scores if traced else LogLinear.scores

        def of(histories: Tensor) -> Tensor:
            pairs = zip(fitted, histories, strict=True)
            return torch.stack([scores(model, history) for model, history in pairs])

        return of


def _fitted(bias: Tensor, public: Tensor, learned: Tensor) -> LogLinear:
    """The model of one slice."""
    return LogLinear(torch.cat([public, learned], 1), bias[:, 0])
