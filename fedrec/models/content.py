# SPDX-License-Identifier: Apache-2.0
"""A linear model whose items need no interactions: factors of old ones from users, of new ones from
their content."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fedrec.config import Width
from fedrec.data.features import FeatureNames
from fedrec.data.interactions import LowRatedConfig
from fedrec.models.base import (
    HistoryForm,
    Parameters,
    ProductsConfig,
    ProductsModel,
    grown_biases,
)
from fedrec.models.linear import PRODUCTS, PUBLIC
from fedrec.sums.fold_in import content_columns, content_names
from fedrec.sums.products import BIAS

# Scores of a user are its vector's products with the items' factors (`fedrec.sums.fold_in`).
#
#     item.bias      popularities, by which users without a known item are ranked for
#     item.public    columns of vectors and categories, which stay as they are
#     item.left      what an item adds to its user's vector
#     item.right     factors of items
#     content.map    from columns to factors, for items that come later
#     item.products  what users' products are sent as a change of; zero on the server
#
# Strategy `content-map` computes left, right and the map from the sum of the users' products.

LEFT = "item.left"
RIGHT = "item.right"
MAP = "content.map"


class ContentMapModelConfig(ProductsConfig, LowRatedConfig):
    """Settings of the factors and of users' histories."""

    factors: Width = 64
    """Largest number of factors; as many as items with EASE's weights."""


class ContentMapModel(ProductsModel):
    """Factors of items, from users or from content."""

    name = "content-map"
    Config = ContentMapModelConfig
    paper = "attribute-to-feature mappings (Gantner et al. 2010) of PureSVD (Cremonesi et al. 2010)"
    products = PRODUCTS
    config: ContentMapModelConfig

    @property
    def form(self) -> HistoryForm:
        return HistoryForm(low_rated=self.config.low_rated)

    @classmethod
    def features_used(cls, config: ContentMapModelConfig, known: FeatureNames) -> FeatureNames:
        """Vectors and categories of items."""
        return content_names(known)

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The public columns, and zeros; nothing is drawn."""
        items = self.schema.num_items
        width = min(self.config.factors, self.size)
        public = content_columns(self.schema.item_features)
        return {
            BIAS: torch.zeros(items, 1),
            PUBLIC: public,
            LEFT: torch.zeros(items, width),
            RIGHT: torch.zeros(items, width),
            MAP: torch.zeros(public.shape[1], width),
            PRODUCTS: torch.zeros(self.size, self.size),
        }

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Scores of the whole catalogue, `[C, B, items]`; the biases for users without a known item
        that has factors."""
        tastes = histories.to(parameters[LEFT].dtype) @ parameters[LEFT]
        scores = tastes @ parameters[RIGHT].transpose(1, 2)
        known = tastes.abs().amax(2, keepdim=True) > 0
        return torch.where(known, scores, parameters[BIAS].transpose(1, 2))

    def grown(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Model.grown`: factors of the new items by the map of the run."""
        public = content_columns(self.schema.item_features)
        more = len(public) - len(parameters[PUBLIC])
        right = public[len(parameters[PUBLIC]) :] @ parameters[MAP]
        return {
            **parameters,
            BIAS: grown_biases(parameters[BIAS], len(public)),
            PUBLIC: public,
            LEFT: F.pad(parameters[LEFT], (0, 0, 0, more)),
            RIGHT: torch.cat([parameters[RIGHT], right]),
        }
