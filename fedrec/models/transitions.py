# SPDX-License-Identifier: Apache-2.0
"""What follows what: weights from a user's last items to the next one
(`fedrec.factors.transitions`).

    s_uj = sum over d = 1..window of decay^(d - 1) W_ij,  i the d-th item of u from the end

As in `item-weights`, the `items` most popular items have weights, and the others are ranked below
them by their biases. Step and strategy `transitions` find the weights in one round.
"""

from __future__ import annotations

from fedrec.data.time_weighting import RecencyConfig
from fedrec.models.base import ProductsConfig
from fedrec.models.item_weights import ItemWeights


class TransitionsModelConfig(ProductsConfig, RecencyConfig):
    """Settings of transitions; their `items` are those with weights."""


class TransitionsModel(ItemWeights):
    """Weights from one item to the next."""

    name = "transitions"
    Config = TransitionsModelConfig
    paper = "a smoothed Markov chain; FPMC (Rendle et al. 2010) without factors"
    config: TransitionsModelConfig

    @property
    def low_rated(self) -> float:
        """None; sequences are of positive items."""
        return 0.0

    @property
    def recency(self) -> RecencyConfig:
        """The last items of a sequence count, by their distance from its end."""
        return self.config
