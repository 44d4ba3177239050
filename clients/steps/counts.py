# SPDX-License-Identifier: Apache-2.0
"""A client's positive items, without training: 1 for each of them, as a change of the items'
biases.

The sum over clients counts how popular each item is. Clipped and noised like any other update it is
a differentially private histogram, and `popularity-start` computes initial biases from it. Nothing
is trained. Counts have no signs, so replacing a client moves their clipped sum by sqrt(2) S at most
(`fedrec.privacy.adjacency`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from clients.local.sufficient_statistics import SufficientStatistics
from clients.local.updates import Part
from clients.step import StepConfig
from fedrec.errors import ExperimentError


class CountsConfig(StepConfig):
    """Settings of counting; with `epochs = 0` nothing is counted, with any other number once."""

    parameter: str = "item.bias"
    """The table `[items, 1]` that the counts are sent as a change of."""


class Counts(SufficientStatistics):
    """Sends the indicator vector of a client's positive items.

    A user who likes n items has an update of L2 norm sqrt(n) and L1 norm n.
    """

    Config = CountsConfig
    contributions = "non-negative"
    config: CountsConfig

    def parts(
        self, parameters: Mapping[str, Tensor], histories: Sequence[np.ndarray]
    ) -> list[dict[str, Part]]:
        """1 for each item of each history.

        Raises:
            ExperimentError: the model has no such table.
        """
        return [self._counted(parameters, items) for items in histories]

    def _counted(self, parameters: Mapping[str, Tensor], items: np.ndarray) -> dict[str, Part]:
        """1 for each item, as a part of the biases; with `epochs = 0` there are no items."""
        name = self.config.parameter
        if name not in parameters or parameters[name].shape != (self.model.schema.num_items, 1):
            raise ExperimentError(
                f"the model has no table {name!r} with one number per item",
                expected="item biases to count on",
                got=", ".join(parameters),
                fix="set model.item-bias = true",
            )
        rows = torch.from_numpy(items)
        return {name: Part(rows, None, torch.ones(len(items), 1, dtype=torch.float64))}
