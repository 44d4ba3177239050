# SPDX-License-Identifier: Apache-2.0
"""Steps that do not train but send sufficient statistics of a client's history, once."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.local.updates import Part, PartialUpdates
from clients.step import CohortStep, StepConfig, Update
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.data.client_data import ClientData


class SufficientStatisticsConfig(StepConfig):
    """Settings of what counts in a history; with `epochs = 0` nothing is sent, with any other
    number once."""

    epochs: int = Field(default=1, ge=0)
    """0 sends nothing, any other number sends the statistics once."""
    low_rated: float = Field(default=0.0, ge=0, le=1)
    """What a rated item that is not positive counts, where a positive one counts 1; 0 leaves them
    out."""


@dataclass(frozen=True, eq=False)
class History:
    """What one client likes, and how much.

    Attributes:
        items: `int64 [n]`, ascending, distinct.
        weights: `float32 [n]`, in (0, 1].
    """

    items: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, data: ClientData, low_rated: float) -> History:
        """The positive items of a client with weight 1, and its other rated items with another one,
        in [0, 1]; 0 leaves these out."""
        likes = np.ones(len(data.positives), dtype=np.float32)
        if not low_rated:
            return cls(data.positives, likes)
        others = data.low_rated
        items = np.concatenate([data.positives, others])
        weights = np.concatenate([likes, np.full(len(others), low_rated, dtype=np.float32)])
        order = np.argsort(items)
        return cls(items[order], weights[order])


class SufficientStatistics(CohortStep):
    """Base of steps whose update is a function of what a client likes, summed over clients.

    A subclass defines in `parts` what one history adds to the parameters, and in `contributions`
    whether these have signs. A subclass with another `parts` is `signed` unless it declares
    otherwise. With `epochs = 0` nothing is sent, with any other number once.
    """

    Config = SufficientStatisticsConfig
    config: SufficientStatisticsConfig

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "parts" in vars(cls) and "contributions" not in vars(cls):
            cls.contributions = "signed"

    @abstractmethod
    def parts(
        self, parameters: Mapping[str, Tensor], histories: Sequence[History]
    ) -> list[dict[str, Part]]:
        """What each history adds to the parameters, by name; other parameters stay unchanged.

        Args:
            parameters: the global ones, without cohort dimension, unchanged.
            histories: of each client.
        """

    def update(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        """What one client adds to the global `parameters` (without cohort dimension, unchanged);
        nothing is drawn."""
        delta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        if not self.config.epochs:
            return Update(delta, 0, math.nan)
        history = History.of(data, self.config.low_rated)
        for name, part in self.parts(parameters, [history])[0].items():
            part.add_to(delta[name], 1.0)
        return Update(delta, len(history.items), math.nan)

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """The whole history as one batch; nothing is drawn."""
        if not self.config.epochs:
            return Batches.whole([])
        history = History.of(data, self.config.low_rated)
        return Batches.whole([(history.items, history.weights)])

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> PartialUpdates:
        """What every client of a block adds."""
        busy = [place for place, steps in enumerate(block.steps) if steps]
        items, weights, sizes = (
            table[0].cpu().numpy() if block.active else np.empty((0, 0))
            for table in (block.items, block.labels, block.sizes)
        )
        histories = [
            History(items[place, : sizes[place]], weights[place, : sizes[place]]) for place in busy
        ]
        found = dict(zip(busy, self.parts(parameters, histories), strict=True))
        changes = [found.get(place, {}) for place in range(len(block))]
        return PartialUpdates(parameters, block, changes, (math.nan,) * len(block))
