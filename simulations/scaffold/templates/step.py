# SPDX-License-Identifier: Apache-2.0
"""Local gradient steps on all of a client's positives at once, each with fresh unobserved items as
negatives."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig
from fedrec.data.client_data import ClientData, draw_negatives
from fedrec.training.block import Batches, Block
from fedrec.training.descent import descend
from fedrec.training.results import Outcome
from fedrec.training.sgd import SgdSettings


class ExampleConfig(StepConfig):
    """Settings; `epochs` comes from `StepConfig`, and 0 must change nothing."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Step size."""
    negatives: int = Field(default=2, ge=1)
    """Unobserved items per positive."""


class Example(Step):
    """Full-batch gradient descent on each client's own data."""

    Config = ExampleConfig
    config: ExampleConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """The examples of each epoch as one batch. All random numbers come from `random`."""
        liked = data.positives
        count = self.config.negatives * len(liked)
        epochs = []
        for _ in range(self.config.epochs if len(liked) else 0):
            drawn = draw_negatives(liked, self.model.schema.num_items, count, random)
            labels = np.zeros(len(liked) + count, dtype=np.float32)
            labels[: len(liked)] = 1.0
            epochs.append((np.concatenate([liked, drawn]), labels))
        return Batches.whole(epochs)

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> Outcome:
        """Train every client of a block, from the global `parameters`, which stay as they are."""
        sgd = SgdSettings(self.config.learning_rate)
        return descend(self.model, parameters, block, sgd, own=own)
