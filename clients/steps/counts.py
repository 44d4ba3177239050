# SPDX-License-Identifier: Apache-2.0
"""A client's rated items, without training: 1 for each positive item, and with `low-rated` a
smaller weight for each of its other rated items, as a change of the items' biases.

The sum over clients counts how popular each item is. Clipped and noised like any other update it is
a differentially private histogram, and `popularity-start` computes initial biases from it. Nothing
is trained. Counts have no signs, so replacing a client moves their clipped sum by sqrt(2) S at most
(`fedrec.privacy.adjacency`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from clients.local.sufficient_statistics import SufficientStatistics, SufficientStatisticsConfig
from fedrec.errors import ExperimentError
from fedrec.factors.chosen_items import BIAS
from fedrec.models.base import Parameters


class Counts(SufficientStatistics):
    """Sends the vector of a client's weights, the indicator of its positive items by default.

    A user who likes n items has an update of L2 norm sqrt(n) and L1 norm n then.
    """

    name = "counts"
    Config = SufficientStatisticsConfig
    contributions = "non-negative"
    config: SufficientStatisticsConfig

    def entries(
        self, parameters: Mapping[str, Tensor], items: np.ndarray, weights: np.ndarray
    ) -> tuple[str, np.ndarray, np.ndarray]:
        """The weight of each item, in the item's own row."""
        return BIAS, items, weights.astype(np.float64)

    def refuse_misfits(self, parameters: Parameters) -> None:
        """Refuse a model without a table of item biases."""
        shape: tuple[int, ...] = tuple(parameters[BIAS].shape) if BIAS in parameters else (0,)
        # an audit's model has rows after the items'
        if shape[1:] != (1,) or shape[0] < self.model.schema.num_items:
            raise ExperimentError(
                f"the model has no table {BIAS!r} with one number per item",
                expected="item biases to count on",
                got=", ".join(parameters),
                fix="set model.item-bias = true",
            )
