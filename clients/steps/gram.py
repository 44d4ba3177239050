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

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from clients.local.sufficient_statistics import SufficientStatistics, SufficientStatisticsConfig
from fedrec.errors import ExperimentError
from fedrec.factors.chosen_items import BIAS, ItemScaleConfig, chosen_items, item_scale
from fedrec.models.base import Model
from fedrec.models.fold_in import PRODUCTS
from fedrec.models.item_weights import WEIGHTS


class GramStepConfig(SufficientStatisticsConfig, ItemScaleConfig):
    """Settings of a client's products."""


class GramStep(SufficientStatistics):
    """Sends the products of one history.

    Raises:
        ExperimentError: the model is not computed from products of items.
    """

    name = "gram"
    Config = GramStepConfig
    contributions = "non-negative"
    symmetric = (WEIGHTS, PRODUCTS)
    paper = "EASE (Steck 2019), equation 8: X^T X as a sum over users"
    outer: ClassVar[bool] = True
    config: GramStepConfig

    def __init__(self, config: GramStepConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        if not model.products:
            raise ExperimentError(
                f"model {type(model).__name__!r} has no products of items",
                expected="model.name = 'item-weights', or another model of products of items",
                got=type(model).__name__,
                fix="set model.name = 'item-weights', or another step",
            )
        self.products = model.products

    def entries(
        self, parameters: Mapping[str, Tensor], items: np.ndarray, weights: np.ndarray
    ) -> tuple[str, np.ndarray, np.ndarray]:
        """The weight of each chosen item times its scale, in the item's row of the products."""
        catalogue = self.model.schema.num_items
        size = len(parameters[self.products])
        bias = parameters[BIAS][:, 0].cpu() if BIAS in parameters else torch.zeros(catalogue)
        chosen = chosen_items(bias, size)
        scale = item_scale(bias[chosen], self.config.exponent).numpy()
        row_of = np.full(catalogue, -1)
        row_of[chosen.numpy()] = np.arange(size)
        rows = row_of[items]
        return self.products, rows, weights * scale[rows]
