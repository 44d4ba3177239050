# SPDX-License-Identifier: Apache-2.0
"""What a client likes, as it is: 1 for each of its positive items, on the items' biases.

The sum over clients counts how popular each item is. Clipped and noised like any other update it is
a differentially private histogram, and `popularity-start` makes starting values of it. Nothing is
trained. Counts have no signs, so replacing a client moves their clipped sum by sqrt(2) S at most
(`fedrec.privacy.adjacency`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clients.step import Step, StepConfig, Update
from fedrec.data.client_data import ClientData
from fedrec.errors import ExperimentError


class CountsConfig(StepConfig):
    """Settings of counting; with `epochs = 0` nothing is counted, with any other number once."""

    parameter: str = "item.bias"
    """The table `[items, 1]` that the counts are sent as a change of."""


class Counts(Step):
    """Sends the indicator vector of a client's positive items.

    A user who likes n items has an update of L2 norm sqrt(n) and L1 norm n.
    """

    Config = CountsConfig
    contributions = "non-negative"
    config: CountsConfig

    def update(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        """Train on one client's data, starting from the global `parameters` (without cohort
        dimension, unchanged).

        Raises:
            ExperimentError: the model has no such table.
        """
        name = self.config.parameter
        if name not in parameters or parameters[name].shape != (self.model.schema.num_items, 1):
            raise ExperimentError(
                f"the model has no table {name!r} with one number per item",
                expected="item biases to count on",
                got=", ".join(parameters),
                fix="set model.item-bias = true",
            )
        delta = {key: torch.zeros_like(value) for key, value in parameters.items()}
        if self.config.epochs:  # none leaves everything as it is, as with any step
            delta[name][torch.from_numpy(data.positives)] = 1.0
        return Update(delta, len(data.positives), math.nan)
