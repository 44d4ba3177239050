# SPDX-License-Identifier: Apache-2.0
"""Steps that do not train but send sufficient statistics of a client's history, once."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.local.updates import Part, PartialUpdates
from clients.step import CohortStep, Update
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.data.client_data import ClientData


class SufficientStatistics(CohortStep):
    """Base of steps whose update is a function of what a client likes, summed over clients.

    A subclass defines in `parts` what one history adds to the parameters, and in `contributions`
    whether these have signs. A subclass with another `parts` is `signed` unless it declares
    otherwise. With `epochs = 0` nothing is sent, with any other number once.
    """

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "parts" in vars(cls) and "contributions" not in vars(cls):
            cls.contributions = "signed"

    @abstractmethod
    def parts(
        self, parameters: Mapping[str, Tensor], histories: Sequence[np.ndarray]
    ) -> list[dict[str, Part]]:
        """What each history adds to the parameters, by name; other parameters stay unchanged.

        Args:
            parameters: the global ones, without cohort dimension, unchanged.
            histories: liked items of each client, `int64 [n]`, distinct.
        """

    def update(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        """What one client adds to the global `parameters` (without cohort dimension, unchanged);
        nothing is drawn."""
        delta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        items = data.positives if self.config.epochs else data.positives[:0]
        for name, part in self.parts(parameters, [items])[0].items():
            part.add_to(delta[name], 1.0)
        return Update(delta, len(items), math.nan)

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """The whole history as one batch; nothing is drawn."""
        likes = np.ones(len(data.positives), np.float32)
        return Batches.whole([(data.positives, likes)] if self.config.epochs else [])

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> PartialUpdates:
        """What every client of a block adds."""
        busy = [place for place, steps in enumerate(block.steps) if steps]
        histories = [
            block.items[0, place, : int(block.sizes[0, place])].cpu().numpy() for place in busy
        ]
        found = dict(zip(busy, self.parts(parameters, histories), strict=True))
        changes = [found.get(place, {}) for place in range(len(block))]
        return PartialUpdates(parameters, block, changes, (math.nan,) * len(block))
