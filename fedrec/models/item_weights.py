# SPDX-License-Identifier: Apache-2.0
"""A linear item-to-item model: a user's score of an item is the sum of its weights to the items
that the user likes (SLIM, Ning and Karypis 2011; EASE, Steck 2019).

It has no user parameters and needs no features, so it can score any user with a history. Only the
`items` most popular items, by the items' biases, have weights; all others are ranked below these,
by their biases. Before any item has weights, all are ranked by their biases.

    s_uj = sum over i in the history of u of x_ui B_ij

with x_ui = 1 for liked items and `low-rated` for other rated ones.

With step and strategy `gram` the weights are found in one round.
"""

import torch
from torch import Tensor

from fedrec.data.low_rated import LowRatedConfig
from fedrec.factors.chosen_items import BIAS, chosen_items
from fedrec.models.base import Parameters, ProductsConfig, ProductsModel

WEIGHTS = "item.weights"


class ItemWeightsConfig(ProductsConfig, LowRatedConfig):
    """Settings of the linear item-to-item model; its `items` are those with weights."""


class ItemWeights(ProductsModel):
    """Weights between items."""

    name = "item-weights"
    Config = ItemWeightsConfig
    paper = "SLIM (Ning and Karypis 2011), EASE (Steck 2019)"
    products = WEIGHTS
    config: ItemWeightsConfig

    @property
    def low_rated(self) -> float:
        """The weight in histories of a rated item that is not positive."""
        return self.config.low_rated

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Zero biases and weights; nothing is drawn."""
        return {
            BIAS: torch.zeros(self.schema.num_items, 1),
            WEIGHTS: torch.zeros(self.size, self.size),
        }

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Scores of the whole catalogue, `[C, B, items]`; the biases for users without a known item
        with weights."""
        return torch.stack(
            [
                self._scores(bias[:, 0], weights, own)
                for bias, weights, own in zip(
                    parameters[BIAS], parameters[WEIGHTS], histories, strict=True
                )
            ]
        )

    def _scores(self, bias: Tensor, weights: Tensor, histories: Tensor) -> Tensor:
        """Scores `[B, items]` of one slice's users."""
        popularity = _between(bias)
        chosen = chosen_items(bias, self.size)
        known = histories[:, chosen].to(weights.dtype)
        found = known @ weights
        scores = found.amin(1, keepdim=True) - 1 + popularity.expand(len(histories), -1)
        scores[:, chosen] = found
        weighted = known.any(1, keepdim=True) & weights.any()
        return torch.where(weighted, scores, popularity)


def _between(bias: Tensor) -> Tensor:
    """Biases moved into [0, 1), their order kept."""
    spread = bias.max() - bias.min()
    return (bias - bias.min()) / (spread.clamp(min=1e-9) * 1.001)
