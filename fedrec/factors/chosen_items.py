# SPDX-License-Identifier: Apache-2.0
"""The items that a Gram matrix is about, and what each of them counts in it.

Noisy counts choose them: the items with the largest biases, which are logarithms of shares of users
who like an item. Under noise, popular items would take most of a user's norm, so that items may be
scaled by a negative power of these shares.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config

BIAS = "item.bias"
"""Name of the parameter `[items, 1]` by which items are chosen and scaled."""


class ItemScaleConfig(Config):
    """Setting that a step which sends products of items shares with the strategy that solves for
    a model."""

    exponent: float = Field(default=0.0, ge=0)
    """Items are scaled by their shares of likers to the power of minus this (as `popularity-start`
    found them); 0 counts all alike. Under noise, popular items otherwise take most of the norm."""


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
