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

from clients.local.updates import Part, PartialUpdates
from clients.step import CohortStep, StepConfig, Update
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.data.client_data import ClientData
from fedrec.errors import ExperimentError

_EVERYTHING = 2**40  # items in a batch


class CountsConfig(StepConfig):
    """Settings of counting; with `epochs = 0` nothing is counted, with any other number once."""

    parameter: str = "item.bias"
    """The table `[items, 1]` that the counts are sent as a change of."""


class Counts(CohortStep):
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
        delta = {key: torch.zeros_like(value) for key, value in parameters.items()}
        items = data.positives if self.config.epochs else data.positives[:0]
        for name, part in self._counted(parameters, items).items():
            part.add_to(delta[name], 1.0)
        return Update(delta, len(items), math.nan)

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work, from the same random draws as `update`. The whole
        history; nothing is drawn."""
        likes = np.ones(len(data.positives), np.float32)
        return Batches.cut([(data.positives, likes)] if self.config.epochs else [], _EVERYTHING)

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> PartialUpdates:
        """Train every client of a block."""
        changes = [
            self._counted(
                parameters, block.items[0, place, : int(block.sizes[0, place])].cpu().numpy()
            )
            if steps
            else {}
            for place, steps in enumerate(block.steps)
        ]
        return PartialUpdates(parameters, block, changes, (math.nan,) * len(block))

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
