# SPDX-License-Identifier: Apache-2.0
"""Steps that do not train but send sufficient statistics of a client's history, once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig
from clients.steps.updates import VectorUpdates
from fedrec.components.registry import covers_overrides
from fedrec.data.client_data import ClientData
from fedrec.data.interactions import LowRatedConfig
from fedrec.data.population import Population
from fedrec.models.base import Parameters
from fedrec.training.block import Batches, Block


class OnceConfig(StepConfig):
    """Settings of what is sent once; with `epochs = 0` nothing is, with any other number once."""

    epochs: int = Field(default=1, ge=0)
    """0 sends nothing, any other number sends the statistics once."""


class SufficientStatisticsConfig(OnceConfig, LowRatedConfig):
    """Settings of what counts in a history."""


class SufficientStatistics(Step):
    """Base of steps whose update is a sparse vector of a client's items, or its outer product with
    itself.

    A subclass defines in `entries` what each item adds, and in `contributions` whether updates have
    signs. A subclass with other `entries` is `signed` unless it declares otherwise. With `epochs =
    0` nothing is sent, with any other number once. Nothing is drawn, so any number of clients is
    computed at once from their rows (`whole_block`).

    Attributes:
        outer: whether the parameter changes by the outer product of the vector with itself.
    """

    Config: ClassVar[type[OnceConfig]] = SufficientStatisticsConfig
    config: OnceConfig
    outer: ClassVar[bool] = False

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "entries" in vars(cls) and "contributions" not in vars(cls):
            cls.contributions = "signed"

    @abstractmethod
    def entries(
        self, parameters: Mapping[str, Tensor], items: np.ndarray, weights: np.ndarray
    ) -> tuple[str, np.ndarray, np.ndarray]:
        """The vector's entries, each a function of its item and weight alone.

        Args:
            parameters: the global ones, without cohort dimension, unchanged.
            items: `int64 [n]`.
            weights: `float32 [n]`, in (0, 1], how much each is liked.

        Returns:
            The name of the parameter that changes; for each item the row that its entry changes,
            `int64 [n]`, -1 for none; and the entry, `float64 [n]`.
        """

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """The whole history as one batch; nothing is drawn."""
        return Batches.whole([self._history(data)] if self.config.epochs else [])

    def train_block(
        self, parameters: Parameters, block: Block, own: Parameters | None = None
    ) -> VectorUpdates:
        """What every client of a block adds."""
        if not block.active:
            return self._outcome(parameters, block, *_NOTHING)
        items = block.items[0].numpy(force=True)
        weights = block.labels[0].numpy(force=True)
        real = np.arange(items.shape[1]) < np.array(block.examples)[:, None]
        return self._outcome(parameters, block, items[real], weights[real])

    @property
    def whole(self) -> bool:
        """Whether `whole_block` gives the same as the other methods, of which a subclass may have
        its own."""
        return covers_overrides(type(self), "whole_block", ("batches", "block", "train_block"))

    def whole_block(
        self, parameters: Mapping[str, Tensor], population: Population, clients: np.ndarray
    ) -> VectorUpdates:
        """The same as `train_block`, of some clients `int64 [clients]` at once."""
        if not self.config.epochs:
            block = Block.without_batches([0] * len(clients))
            return self._outcome(parameters, block, *_NOTHING)
        offsets, items, weights = self._histories(population, clients)
        block = Block.without_batches(np.diff(offsets).tolist())
        return self._outcome(parameters, block, items, weights)

    def kernel_refusal(self) -> str:
        """Nothing is trained."""
        return f"step {type(self).__name__} adds up all clients at once and trains nothing"

    def _history(self, data: ClientData) -> tuple[np.ndarray, np.ndarray]:
        """What counts of a client's items, and their weights."""
        return data.weighted_items(self._low_rated) if self.config.epochs else _NOTHING

    def _histories(
        self, population: Population, clients: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same of some clients, one after the other, with offsets `int64 [clients + 1]`."""
        return population.weighted_items(clients, self._low_rated)

    @property
    def _low_rated(self) -> float:
        return self.config.low_rated if isinstance(self.config, LowRatedConfig) else 0.0

    def _outcome(
        self, parameters: Mapping[str, Tensor], block: Block, items: np.ndarray, weights: np.ndarray
    ) -> VectorUpdates:
        """The updates of a block from the items of its clients, given one after the other."""
        name, rows, values = self.entries(parameters, items, weights)
        sent = rows >= 0
        clients = np.arange(len(block) + 1)
        places = np.repeat(clients[:-1], block.examples)[sent]
        offsets = np.searchsorted(places, clients)
        return VectorUpdates(parameters, block, name, offsets, rows[sent], values[sent], self.outer)


_NOTHING = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
