# SPDX-License-Identifier: Apache-2.0
"""A client's own ratings, mapped to [-1, 1], and 1 for each rated item.

Summed over clients these are sums and numbers of ratings. Clipped and noised like any other update
they are differentially private, and `means-start` computes item means from them. Nothing is
trained. No two clients' updates point away from each other, so replacing one moves their clipped
sum by sqrt(2) S at most (`fedrec.neighbourhood.means`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clients.local.one_by_one import Update, one_by_one
from clients.local.updates import Updates
from clients.step import Step, StepConfig
from fedrec.cohort.block import Block
from fedrec.data.client_data import ClientData
from fedrec.errors import ExperimentError
from fedrec.models.base import Parameters
from fedrec.neighbourhood.means import Scale, scaled


class RatingSumsConfig(StepConfig):
    """Settings of adding up ratings; with `epochs = 0` nothing is sent, with any other number
    once."""

    scale: Scale = (1.0, 5.0)
    """Lowest and highest rating; public. Ratings outside are clamped to it."""


class RatingSums(Step):
    """Sends ratings in [-1, 1] and indicators, as changes of `item.mean` and `item.count`.

    A user with n ratings has an update of L2 norm between sqrt(n) and sqrt(2 n).
    """

    name = "rating-sums"
    Config = RatingSumsConfig
    contributions = "non-negative"
    config: RatingSumsConfig

    def train_block(
        self, parameters: Parameters, block: Block, own: Parameters | None = None
    ) -> Updates:
        """The ratings of every client of a block."""
        return one_by_one(parameters, block, own, self._sums)

    def refuse_misfits(self, parameters: Parameters) -> None:
        """Refuse a model without item means."""
        if "item.mean" not in parameters or "item.count" not in parameters:
            raise ExperimentError(
                "the model has no item means",
                expected="parameters 'item.mean' and 'item.count'",
                got=", ".join(parameters),
                fix="set model.name = 'pnbm'",
            )

    def _sums(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        delta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        items = data.positives
        ratings = data.amounts(rated=True)
        if self.config.epochs and len(items):  # 0 changes nothing, as in any step
            rows = torch.from_numpy(items).to(self.device)
            values = torch.from_numpy(scaled(ratings, self.config.scale)).to(self.device)
            delta["item.mean"][rows, 0] = values.to(delta["item.mean"].dtype)
            delta["item.count"][rows, 0] = 1.0
        return Update(delta, len(items))
