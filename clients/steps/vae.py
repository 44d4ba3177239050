# SPDX-License-Identifier: Apache-2.0
"""Local training of the variational autoencoder on the client's own history (Fang et al. 2022,
equations 7 and 19).

A client is one example: its whole history. In each epoch it draws new dropout and a new code and
takes one gradient step on minus the evidence lower bound. With one epoch the update is a gradient,
and the server's optimiser does the rest; that is batch training with the cohort as the batch.

Where this differs from the paper: it raises beta "gradually from 0 to 1" and keeps the best, here
beta rises linearly over `anneal-rounds` rounds to `beta` and stays there (its table 3: 0.5 for
MovieLens-100K).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from pydantic import Field

from clients.local.histories import (
    HistoryBlock,
    HistoryObjective,
    HistoryStep,
    HistoryStepConfig,
)
from clients.local.per_example_gradients import Recorder
from clients.local.updates import FactoredUpdates
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.descent import descend
from fedrec.cohort.outcome import Outcome
from fedrec.cohort.sgd import SgdSettings
from fedrec.data.client_data import ClientData
from fedrec.models.base import Parameters


class VaeStepConfig(HistoryStepConfig):
    """Settings of local training of the variational autoencoder."""

    epochs: int = Field(default=1, ge=0)
    """Gradient steps on the client's history; 0 trains nothing."""
    learning_rate: float = Field(default=0.01, gt=0)
    """Step size on the device; of no effect on the result with one epoch and an adaptive server."""


class VaeStep(HistoryStep):
    """Gradient steps on one client's evidence lower bound."""

    name = "vae"
    Config = VaeStepConfig
    paper = "DP-VAE (Fang et al. 2022), eq. 7 and 19"
    config: VaeStepConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work; none for a client without a positive item."""
        steps = self.config.epochs if len(data.positives) else 0
        return self.history_batches(data, steps, random)

    def train_block(
        self, parameters: Parameters, block: Block, own: Parameters | None = None
    ) -> Outcome:
        """Train every client of a block. One epoch is one backward pass for all clients
        together."""
        config = self.config
        if config.epochs != 1 or not isinstance(block, HistoryBlock):
            sgd = SgdSettings(config.learning_rate)
            objective = HistoryObjective(self.model, config.beta)
            return descend(self.model, parameters, block, sgd, objective)
        recorder = Recorder()
        trains = block.histories.any(1)
        log_chances, distances = block.parts(self.model, parameters, recorder)
        losses = config.beta * distances - (log_chances * block.histories).sum(-1)
        rates = torch.where(trains, -config.learning_rate, 0.0).double()
        factors = recorder.gradients(losses[:, None]).weighted(rates[None])
        reported = torch.where(trains, losses.detach(), math.nan)
        return FactoredUpdates(parameters, block, factors, tuple(reported.tolist()))
