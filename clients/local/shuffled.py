# SPDX-License-Identifier: Apache-2.0
"""Steps on shuffled batches of positives and of negatives that are drawn once a round."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from clients.local.examples import labelled
from clients.step import Step, StepConfig
from fedrec.cohort.batches import Batches
from fedrec.data.client_data import ClientData


class ShuffledConfig(StepConfig):
    """Settings of steps on shuffled batches."""

    epochs: int = Field(default=1, ge=0)
    """Passes over the examples; 0 trains nothing."""
    batch_size: int = Field(default=256, ge=1)
    """Examples per gradient step."""
    negatives: int = Field(default=4, ge=1)
    """Unobserved items per positive (ranking only)."""


class ShuffledStep(Step):
    """Base of steps on shuffled batches."""

    config: ShuffledConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work; none for a client without examples."""
        config = self.config
        epochs = []
        if config.epochs:
            items, labels = self._examples(data, random)
            for _ in range(config.epochs if len(items) else 0):
                order = random.permutation(len(items))
                epochs.append((items[order], labels[order]))
        return Batches.cut(epochs, config.batch_size)

    def _examples(
        self, data: ClientData, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Items and labels, the first that is drawn."""
        return labelled(data, self.model.schema, self.config.negatives, "ignore", random)
