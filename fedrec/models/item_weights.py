# SPDX-License-Identifier: Apache-2.0
"""A linear item-to-item model: a user's score of an item is the sum of its weights to the items
that the user likes (SLIM, Ning and Karypis 2011; EASE, Steck 2019).

It has no user parameters and needs no features, so it can score any user with a history. Only the
`items` most popular items, by the items' biases, have weights; all others are ranked below these,
by their biases. Before any item has weights, all are ranked by their biases.

    s_uj = sum over i in the history of u of B_ij

With step and strategy `gram` the weights are found in one round.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.data.schema import Schema
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Parameters

WEIGHTS = "item.weights"
BIAS = "item.bias"


class ItemScaleConfig(Config):
    """Setting shared by steps that send products of items and the strategy that solves for the
    weights."""

    exponent: float = Field(default=0.0, ge=0)
    """Items are scaled by their shares of likers to the power of minus this (as `popularity-start`
    found them); 0: equal weights. Under noise, popular items otherwise dominate the norm."""


class ItemWeightsConfig(Config):
    """Settings of the linear item-to-item model."""

    items: int = Field(default=4000, ge=1, le=20_000)
    """Number of items with weights, the most popular ones; at most the catalogue. Memory grows with
    its square: 4,000 items take 64 MB."""


class ItemWeights(HistoryModel):
    """Weights between items.

    Raises:
        ExperimentError: the task is to predict ratings.
    """

    Config = ItemWeightsConfig
    paper = "SLIM (Ning and Karypis 2011), EASE (Steck 2019)"
    config: ItemWeightsConfig

    def __init__(self, config: ItemWeightsConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        if schema.task != "ranking":
            raise ExperimentError(
                "the linear item-to-item model ranks items and predicts no ratings",
                expected="task = 'ranking'",
                got=f"task = {schema.task!r}",
                fix="set task = 'ranking', or model.name = 'mf'",
            )
        self.size = min(config.items, schema.num_items)

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
        if not weights.any():
            return popularity.expand(len(histories), -1)
        chosen = chosen_items(bias, self.size)
        known = (histories[:, chosen] > 0).to(weights.dtype)
        found = known @ weights
        scores = found.amin(1, keepdim=True) - 1 + popularity.expand(len(histories), -1)
        scores[:, chosen] = found
        return torch.where(known.any(1, keepdim=True), scores, popularity)


def chosen_items(bias: Tensor, count: int) -> Tensor:
    """`int64 [count]`, ascending: the items of the largest biases `[items]`, the first among
    equals."""
    if count == len(bias):
        return torch.arange(count, device=bias.device)
    return torch.argsort(bias, descending=True, stable=True)[:count].sort().values


def item_scale(bias: Tensor, exponent: float) -> Tensor:
    """Weight of each item in its own and other items' products, `float64 [items]`, with mean 1.

    Args:
        bias: logarithms of the items' shares of likers, `[items]`.
        exponent: >= 0; items count by their shares to the power of minus this.
    """
    scale = torch.exp(-exponent * bias.double())
    return scale / scale.mean()


def _between(bias: Tensor) -> Tensor:
    """Biases moved into [0, 1), their order kept."""
    spread = bias.max() - bias.min()
    return (bias - bias.min()) / (spread.clamp(min=1e-9) * 1.001)
