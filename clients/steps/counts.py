# SPDX-License-Identifier: Apache-2.0
"""A client's rated items, without training: 1 for each positive item, and with `low-rated` a
smaller weight for each of its other rated items, as a change of the items' biases.

The sum over clients counts how popular each item is. Clipped and noised like any other update it is
a differentially private histogram, and `popularity-start` computes initial biases from it. Nothing
is trained. Counts have no signs, so replacing a client moves their clipped sum by sqrt(2) S at most
(`fedrec.privacy.adjacency`).
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


class CountsConfig(SufficientStatisticsConfig):
    """Settings of counting."""

    parameter: str = "item.bias"
    """The table `[items, 1]` that the counts are sent as a change of."""


class Counts(SufficientStatistics):
    """Sends the vector of a client's weights, the indicator of its positive items by default.

    A user who likes n items has an update of L2 norm sqrt(n) and L1 norm n then.
    """

    Config = CountsConfig
    contributions = "non-negative"
    config: CountsConfig

    def parts(
        self, parameters: Mapping[str, Tensor], histories: Sequence[History]
    ) -> list[dict[str, Part]]:
        """The weight of each item of each history.

        Raises:
            ExperimentError: the model has no such table.
        """
        return [self._counted(parameters, history) for history in histories]

    def _counted(self, parameters: Mapping[str, Tensor], history: History) -> dict[str, Part]:
        """The weight of each item, as a part of the biases."""
        name = self.config.parameter
        if name not in parameters or parameters[name].shape != (self.model.schema.num_items, 1):
            raise ExperimentError(
                f"the model has no table {name!r} with one number per item",
                expected="item biases to count on",
                got=", ".join(parameters),
                fix="set model.item-bias = true",
            )
        weights = torch.from_numpy(history.weights).double()
        return {name: Part(torch.from_numpy(history.items), None, weights[:, None])}
