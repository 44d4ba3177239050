# SPDX-License-Identifier: Apache-2.0
"""A client's own ratings as they are: deviations from the middle of the scale, and 1 for each rated item.

Summed over clients these are sums and numbers of ratings. Clipped and noised like any other update they are
differentially private, and `means-start` makes item means of them. Nothing is trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.steps.base import Step, StepConfig, Update
from fedrec.data.population import ClientData
from fedrec.errors import ExperimentError


class RatingSumsConfig(StepConfig):
    """Settings of adding up ratings; with `epochs = 0` nothing is sent, with any other number once."""

    most_ratings: int | None = Field(default=None, ge=1)
    """Of more ratings so many are sent, drawn at random; default: all."""


class RatingSums(Step):
    """Sends deviations and indicators, as changes of `item.mean` and `item.count`.

    A user with n ratings has an update of L2 norm between sqrt(n) and sqrt(n (1 + h^2)), h being half the scale's
    width.
    """

    Config = RatingSumsConfig
    config: RatingSumsConfig

    def update(self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator) -> Update:
        """See `Step.update`.

        Raises:
            ExperimentError: the model has no item means.
        """
        if "item.mean" not in parameters or "item.count" not in parameters:
            raise ExperimentError(
                "the model has no item means",
                expected="parameters 'item.mean' and 'item.count'",
                got=", ".join(parameters),
                fix="set model.name = 'pnbm'",
            )
        delta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        items, ratings = data.positives, data.amounts(rated=True)
        if self.config.epochs and len(items):  # none leaves everything as it is, as with any step
            drawn = np.arange(len(items))
            if self.config.most_ratings is not None and len(items) > self.config.most_ratings:
                drawn = np.sort(random.choice(len(items), self.config.most_ratings, replace=False))
            rows = torch.from_numpy(items[drawn]).to(self.device)
            values = torch.from_numpy(ratings[drawn]).to(self.device)
            delta["item.mean"][rows, 0] = values - parameters["item.mean"][rows, 0]
            delta["item.count"][rows, 0] = 1.0
        return Update(delta, len(items), math.nan)
