# SPDX-License-Identifier: Apache-2.0
"""Local training on whole histories, and that of the variational autoencoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig
from clients.steps.own_noise import Recorder
from fedrec.data.client_data import ClientData
from fedrec.device import on_device
from fedrec.models.base import Parameters
from fedrec.models.priors import user_priors
from fedrec.models.vae import Draw, Prior, Tap, Vae
from fedrec.privacy.personal import PersonalNoise, PriorsConfig
from fedrec.training.block import Batches, Block, UserCodes
from fedrec.training.results import BlockUpdate, outer_products


@dataclass(frozen=True, eq=False)
class HistoryBatches(Batches):
    """One client's work: a step on its history, or none.

    Attributes:
        history: `int64 [N]`, distinct items.
        amounts: `float32 [N]`, how much each is liked.
        retained: `bool [S, N]`, which of them dropout leaves in the step, if there is one.
        noise: `float32 [S, K]`, standard normal, for the code.
        prior: mean and variance of the client's prior, `float32 [K]` each; None: the standard one.
        drawn: `int64 [J]`, the items that are examples, if an example is a single item.
        random: the client's stream after all these draws, for noise on the update.
        client: the client's id.
    """

    history: np.ndarray
    amounts: np.ndarray
    retained: np.ndarray
    noise: np.ndarray
    prior: tuple[np.ndarray, np.ndarray] | None
    drawn: np.ndarray
    random: np.random.Generator
    client: int


@dataclass(frozen=True, eq=False)
class HistoryBlock(Block):
    """A block of clients with histories.

    Attributes:
        histories: `float32 [C, items]`.
        retained: `bool [C, items]`.
        noise: `float32 [C, K]`.
        prior: `[C, 1, K]`; None where every client has the standard one.
        drawn: `int64 [C, J]`, padded with item 0.
        drawn_counts: `int64 [C]`.
    """

    histories: Tensor
    retained: Tensor
    noise: Tensor
    prior: Prior | None
    drawn: Tensor
    drawn_counts: Tensor

    @classmethod
    def of(
        cls,
        users: UserCodes,
        batches: Sequence[Batches],
        device: torch.device,
        model: Vae | None = None,
    ) -> Self:
        """Make a block of clients from `HistoryBatches`; the model determines the number of items
        and of random numbers."""
        members = [batch for batch in batches if isinstance(batch, HistoryBatches)]
        if model is None or len(members) != len(batches):
            raise TypeError("Expected HistoryBatches and the model that they are for.")
        items = model.schema.num_items
        latent = model.config.latent
        histories = np.zeros((len(members), items), dtype=np.float32)
        retained = np.zeros(histories.shape, dtype=bool)
        noise = np.zeros((len(members), latent), np.float32)
        drawn = np.zeros(
            (len(members), max(1, *(len(batch.drawn) for batch in members))), dtype=np.int64
        )
        for index, batch in enumerate(members):
            histories[index, batch.history] = batch.amounts
            if len(batch.sizes):
                retained[index, batch.history] = batch.retained[0]
                noise[index] = batch.noise[0]
            drawn[index, : len(batch.drawn)] = batch.drawn
        plain = Block.of(users, batches, device)
        shared = {field.name: getattr(plain, field.name) for field in fields(Block)}
        return cls(
            **shared,
            histories=on_device(histories, device),
            retained=on_device(retained, device),
            noise=on_device(noise, device),
            prior=_prior(members, device),
            drawn=on_device(drawn, device),
            drawn_counts=on_device(np.array([len(batch.drawn) for batch in members]), device),
        )

    @property
    def histories_of(self) -> list[HistoryBatches]:
        """The clients' batches."""
        return [batch for batch in self.members if isinstance(batch, HistoryBatches)]

    def parts(
        self, model: Vae, parameters: Mapping[str, Tensor], tap: Tap
    ) -> tuple[Tensor, Tensor]:
        """The terms of the bound: log-probabilities of the items `[C, B, items]`, and divergences
        `[C, B]`. For all clients under the same parameters: `[C, items]` and `[C]`."""
        shared = {name: value.unsqueeze(0) for name, value in parameters.items()}
        prior = (
            None if self.prior is None else Prior(self.prior.mean[:, 0], self.prior.variance[:, 0])
        )
        draw = Draw(self.retained[None], self.noise[None])
        log_chances, distances = model.parts(shared, self.histories.unsqueeze(0), draw, prior, tap)
        return log_chances[0], distances[0]


def _prior(batches: Sequence[HistoryBatches], device: torch.device) -> Prior | None:
    priors = [batch.prior for batch in batches if batch.prior is not None]
    if len(priors) != len(batches):
        return None
    mean, variance = (
        on_device(np.stack(part).astype(np.float32), device).unsqueeze(1)
        for part in zip(*priors, strict=True)
    )
    return Prior(mean, variance)


class HistoryStepConfig(StepConfig):
    """Settings of training on histories."""

    epochs: int = Field(default=1, ge=0, le=1)
    """1: one gradient step on the client's history in a round; 0 trains nothing."""
    beta: float = Field(default=0.5, ge=0)
    """Weight of the divergence from the prior after annealing (paper: 0.5 for MovieLens-100K)."""
    anneal_rounds: int = Field(default=0, ge=0)
    """Rounds over which beta rises linearly from 0; 0: full weight from the start."""
    priors: PriorsConfig | None = None
    """Priors of the users' codes from their metadata (equation 11), without noise; default:
    standard normal."""

    def in_round(self, round_number: int) -> Self:
        """The settings with the beta of a training round, from 1: linear from 0, the whole from
        round `anneal_rounds` on."""
        rounds = self.anneal_rounds
        share = min(1.0, (round_number - 1) / rounds) if rounds else 1.0
        return self.model_copy(update={"beta": self.beta * share})


class HistoryStep(Step):
    """Base of steps that train the variational autoencoder on a client's own history."""

    trains = Vae
    model: Vae
    config: HistoryStepConfig

    def __init__(self, config: HistoryStepConfig, model: Vae, device: torch.device) -> None:
        super().__init__(config, model, device)
        noise = config if isinstance(config, PersonalNoise) else None
        self.priors = user_priors(config.priors, noise, model)

    def block(self, users: UserCodes, batches: Sequence[Batches], device: torch.device) -> Block:
        return HistoryBlock.of(users, batches, device, self.model)

    def history_batches(
        self,
        data: ClientData,
        steps: int,
        random: np.random.Generator,
        drawn: np.ndarray | None = None,
        examples: int | None = None,
    ) -> HistoryBatches:
        """The batches of one client, with the draws of its step; with `steps = 0`
        nothing is trained. `drawn`, `int64 [J]`: see `HistoryBatches`; `examples`: default
        `steps`."""
        draws = [self.model.draw((1, 1), generator_of(random)) for _ in range(steps)]
        history = data.positives
        retained = np.array([draw.mask[0, 0].numpy()[history] for draw in draws], bool)
        noise = np.array([draw.noise[0, 0].numpy() for draw in draws], np.float32)
        return HistoryBatches(
            items=np.zeros((steps, 0), dtype=np.int64),
            labels=np.zeros((steps, 0), dtype=np.float32),
            sizes=np.zeros(steps, dtype=np.int64),
            examples=steps if examples is None else examples,
            last_epoch=steps,
            history=history,
            amounts=data.amounts(self.model.form.rated),
            retained=retained.reshape(steps, len(history)),
            noise=noise.reshape(steps, -1 if steps else 0),
            prior=None if self.priors is None else self.priors.of(data),
            drawn=history[:0] if drawn is None else drawn,
            random=random,
            client=data.client,
        )


def generator_of(random: np.random.Generator) -> torch.Generator:
    """A torch generator on the CPU that depends on the next number of a client's stream."""
    return torch.Generator().manual_seed(int(random.integers(2**63)))


# Local training of the variational autoencoder on the client's own history (Fang et al. 2022,
# equations 7 and 19).
#
# A client is one example: its whole history. In each round it draws new dropout and a new code and
# takes one gradient step on minus the evidence lower bound. The update is a gradient, and the
# server's optimiser does the rest; that is batch training with the cohort as the batch.
#
# Where this differs from the paper: it raises beta "gradually from 0 to 1" and keeps the best, here
# beta rises linearly over `anneal-rounds` rounds to `beta` and stays there (its table 3: 0.5 for
# MovieLens-100K).


class VaeStepConfig(HistoryStepConfig):
    """Settings of local training of the variational autoencoder."""

    learning_rate: float = Field(default=0.01, gt=0)
    """Step size on the device; of no effect on the result with an adaptive server."""


class VaeStep(HistoryStep):
    """Gradient steps on one client's evidence lower bound."""

    name = "vae"
    Config = VaeStepConfig
    paper = "DP-VAE (Fang et al. 2022), eq. 7 and 19"
    config: VaeStepConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """The step of one client; none for a client without a positive item."""
        return self.history_batches(data, self.config.epochs * bool(len(data.positives)), random)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block, by one backward pass."""
        config = self.config
        if not isinstance(block, HistoryBlock):
            raise TypeError(f"Expected a HistoryBlock, got {type(block).__name__}.")
        recorder = Recorder()
        trains = block.histories.any(1) & bool(config.epochs)
        log_chances, distances = block.parts(self.model, parameters, recorder)
        losses = config.beta * distances - (log_chances * block.histories).sum(-1)
        rates = torch.where(trains, -config.learning_rate, 0.0).double()
        factors = recorder.gradients(losses[:, None]).weighted(rates[None])
        reported = torch.where(trains, losses.detach(), math.nan)
        return BlockUpdate(parameters, block, outer_products(factors), reported)
