# SPDX-License-Identifier: Apache-2.0
"""A client's part in a linear item-to-item model: the products of its own history, once.

With x the indicator of the items that a client likes and D the items' scale, it sends (D x)(D x)^T.
The sum over clients is the Gram matrix of the interactions, which determines EASE, PureSVD and
every other linear model; strategy `gram` solves for one. Nothing is trained. Clipped in L2 and
noised like any other update, the sum is a differentially private release: the Frobenius norm of a
client's matrix is |D x|^2, which is the number of its items if all items have scale 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.local.model_check import require_model
from clients.local.sufficient_statistics import SufficientStatistics
from clients.local.updates import Part
from clients.step import StepConfig
from fedrec.models.base import Model
from fedrec.models.item_weights import (
    BIAS,
    WEIGHTS,
    ItemScaleConfig,
    ItemWeights,
    chosen_items,
    item_scale,
)


class GramConfig(StepConfig, ItemScaleConfig):
    """Settings of a client's products."""

    epochs: int = Field(default=1, ge=0)
    """0 sends nothing, any other number sends the products once."""


class Gram(SufficientStatistics):
    """Sends the products of one history.

    Raises:
        ExperimentError: the model has no weights between items.
    """

    Config = GramConfig
    paper = "EASE (Steck 2019), equation 8: X^T X as a sum over users"
    config: GramConfig

    def __init__(self, config: GramConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        lacks = "weights between items"
        self.size = require_model(model, ItemWeights, "item-weights", lacks=lacks).size

    def parts(
        self, parameters: Mapping[str, Tensor], histories: Sequence[np.ndarray]
    ) -> list[dict[str, Part]]:
        """The products of each history, between its items that have weights."""
        places = self._places(parameters)
        return [self._products(places, items) for items in histories]

    def _places(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Each item's row in the weights, `int64 [items]`, -1 without; and each row's scale."""
        bias = parameters[BIAS][:, 0].cpu()
        chosen = chosen_items(bias, self.size)
        rows = torch.full((len(bias),), -1)
        rows[chosen] = torch.arange(self.size)
        return rows, item_scale(bias[chosen], self.config.exponent)

    def _products(self, places: tuple[Tensor, Tensor], items: np.ndarray) -> dict[str, Part]:
        rows, scale = places
        own = rows[torch.from_numpy(items)]
        own = own[own >= 0]
        if not len(own):
            return {}
        return {WEIGHTS: Part(own, own, torch.outer(scale[own], scale[own]))}
