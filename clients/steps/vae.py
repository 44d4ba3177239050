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
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.local.histories import HistoryBatches, HistoryBlock, HistoryObjective
from clients.local.per_example_gradients import Recorder
from clients.local.updates import FactoredUpdates
from clients.step import Step, StepConfig
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.descent import descend
from fedrec.cohort.outcome import Outcome
from fedrec.cohort.sgd import SgdSettings
from fedrec.data.client_data import ClientData
from fedrec.errors import ExperimentError
from fedrec.models.base import Model
from fedrec.models.vae import Vae
from fedrec.priors.user_level import user_priors
from fedrec.privacy.personal.priors import PriorsConfig


class VaeStepConfig(StepConfig):
    """Settings of local training of the variational autoencoder."""

    epochs: int = Field(default=1, ge=0)
    """Gradient steps on the client's history; 0 trains nothing."""
    learning_rate: float = Field(default=0.01, gt=0)
    """Step size on the device; of no effect on the result with one epoch and an adaptive server."""
    beta: float = Field(default=0.5, ge=0)
    """Weight of the divergence from the prior after annealing (paper: 0.5 for MovieLens-100K)."""
    anneal_rounds: int = Field(default=0, ge=0)
    """Rounds over which beta rises linearly from 0; 0: full weight from the start."""
    priors: PriorsConfig | None = None
    """Priors of the users' codes from their metadata (equation 11), without noise; default:
    standard normal."""


class VaeStep(Step):
    """Gradient steps on one client's evidence lower bound."""

    Config = VaeStepConfig
    paper = "DP-VAE (Fang et al. 2022), eq. 7 and 19"
    config: VaeStepConfig

    def __init__(self, config: VaeStepConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.vae = needs_vae(model)
        self.priors = user_priors(config.priors, None, self.vae)

    def in_round(self, round_number: int) -> VaeStep:
        """The step with the beta of a training round, from 1."""
        beta = annealed(self.config.beta, self.config.anneal_rounds, round_number)
        return type(self)(self.config.model_copy(update={"beta": beta}), self.model, self.device)

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work; none for
        a client without a positive item."""
        epochs = self.config.epochs if len(data.positives) else 0
        draws = [self.vae.draw((1, 1), generator_of(random)) for _ in range(epochs)]
        amounts = data.amounts(self.vae.rated)
        prior = None if self.priors is None else self.priors.of(data)
        return HistoryBatches.of(
            data.positives, amounts, draws, random, client=data.client, prior=prior
        )

    def block(
        self,
        users: Sequence[tuple[np.ndarray, ...]],
        batches: Sequence[Batches],
        device: torch.device,
    ) -> Block:
        """Put clients together, see `Block.of`."""
        return HistoryBlock.of(users, batches, device, self.vae)

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> Outcome:
        """Train every client of a block. One epoch is one backward pass for all clients
        together."""
        config = self.config
        if config.epochs != 1 or not isinstance(block, HistoryBlock):
            sgd = SgdSettings(config.learning_rate)
            objective = HistoryObjective(self.vae, config.beta)
            return descend(self.model, parameters, block, sgd, objective)
        recorder = Recorder()
        trains = block.histories.any(1)
        log_chances, distances = block.parts(self.vae, parameters, recorder)
        losses = config.beta * distances - (log_chances * block.histories).sum(-1)
        rates = torch.where(trains, -config.learning_rate, 0.0).double()
        factors = recorder.gradients(losses[:, None]).weighted(rates[None])
        reported = torch.where(trains, losses.detach(), math.nan)
        return FactoredUpdates(parameters, block, factors, tuple(reported.tolist()))


def annealed(beta: float, rounds: int, round_: int) -> float:
    """Beta in a round, from 1: linear from 0, `beta` from round `rounds` on."""
    return beta * min(1.0, (round_ - 1) / rounds) if rounds else beta


def generator_of(random: np.random.Generator) -> torch.Generator:
    """A torch generator on the CPU that depends on the next number of a client's stream."""
    return torch.Generator().manual_seed(int(random.integers(2**63)))


def needs_vae(model: Model) -> Vae:
    """The model, if it is the variational autoencoder.

    Raises:
        ExperimentError: it is another one.
    """
    if isinstance(model, Vae):
        return model
    raise ExperimentError(
        "this step trains the variational autoencoder only",
        expected="model.name = 'vae'",
        got=type(model).__name__,
        fix="set model.name = 'vae', or step.name = 'sgd'",
    )
