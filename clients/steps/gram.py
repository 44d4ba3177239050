# SPDX-License-Identifier: Apache-2.0
"""A client's part in a linear item-to-item model: the products of its own history, once.

With x the indicator of the items that a client likes (with `low-rated` a smaller weight for its
other rated items) and D the items' scale, it sends (D x)(D x)^T. The sum over clients is the Gram
matrix of the interactions, which determines EASE, PureSVD and every other linear model; strategies
`gram`, `fold-in` and `gram-start` compute one. Nothing is trained.

Clipped in L2 and noised like any other update, the sum is a differentially private release: the
Frobenius norm of a client's matrix is |D x|^2, which is the number of its items if all of them
have weight and scale 1. The matrices are positive semi-definite, so replacing a client moves their
clipped sum by sqrt(2) S at most (`fedrec.privacy.adjacency`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from clients.local.sufficient_statistics import (
    History,
    SufficientStatistics,
    SufficientStatisticsConfig,
)
from clients.local.updates import Part
from fedrec.errors import ExperimentError
from fedrec.factors.chosen_items import BIAS, ItemScaleConfig, chosen_items, item_scale
from fedrec.models.base import Model


class GramConfig(SufficientStatisticsConfig, ItemScaleConfig):
    """Settings of a client's products."""


class Gram(SufficientStatistics):
    """Sends the products of one history.

    Raises:
        ExperimentError: the model is not computed from products of items.
    """

    Config = GramConfig
    contributions = "non-negative"
    paper = "EASE (Steck 2019), equation 8: X^T X as a sum over users"
    config: GramConfig

    def __init__(self, config: GramConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        if not model.products:
            raise ExperimentError(
                f"model {type(model).__name__!r} has no products of items",
                expected="model.name = 'item-weights', or another model of products of items",
                got=type(model).__name__,
                fix="set model.name = 'item-weights', or another step",
            )
        self.products = model.products

    def parts(
        self, parameters: Mapping[str, Tensor], histories: Sequence[History]
    ) -> list[dict[str, Part]]:
        """The products of each history, between its chosen items."""
        places = self._places(parameters)
        return [self._products(places, history) for history in histories]

    def _places(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Each item's row in the products, `int64 [items]`, -1 without; and each row's scale."""
        items, size = self.model.schema.num_items, len(parameters[self.products])
        bias = parameters[BIAS][:, 0].cpu() if BIAS in parameters else torch.zeros(items)
        chosen = chosen_items(bias, size)
        rows = torch.full((items,), -1)
        rows[chosen] = torch.arange(size)
        return rows, item_scale(bias[chosen], self.config.exponent)

    def _products(self, places: tuple[Tensor, Tensor], history: History) -> dict[str, Part]:
        rows, scale = places
        own = rows[torch.from_numpy(history.items)]
        known = own >= 0
        own, weights = own[known], torch.from_numpy(history.weights)[known].double()
        if not len(own):
            return {}
        values = weights * scale[own]
        return {self.products: Part(own, own, torch.outer(values, values))}
