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
from fedrec.training.descent import descend
from fedrec.training.results import BlockUpdate, outer_products
from fedrec.training.sgd import SgdSettings


@dataclass(frozen=True, eq=False)
class HistoryBatches(Batches):
    """One client's work: the same history in every step, with other random numbers.

    Attributes:
        history: `int64 [N]`, distinct items.
        amounts: `float32 [N]`, how much each is liked.
        retained: `bool [S, N]`, which of them dropout leaves in each step.
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
        retained: `bool [S, C, items]`.
        noise: `float32 [S, C, K]`.
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
        steps = max(1, *(len(batch.sizes) for batch in members))
        items = model.schema.num_items
        latent = model.config.latent
        histories = np.zeros((len(members), items), dtype=np.float32)
        retained = np.zeros((steps, *histories.shape), dtype=bool)
        noise = np.zeros((steps, len(members), latent), np.float32)
        drawn = np.zeros(
            (len(members), max(1, *(len(batch.drawn) for batch in members))), dtype=np.int64
        )
        for index, batch in enumerate(members):
            count = len(batch.sizes)
            histories[index, batch.history] = batch.amounts
            if count:
                retained[:count, index, batch.history] = batch.retained
                noise[:count, index] = batch.noise
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

    def draw(self, step: int) -> Draw:
        """The random numbers of a step for all clients, with the clients as cohort dimension."""
        return Draw(self.retained[step].unsqueeze(1), self.noise[step].unsqueeze(1))

    def parts(
        self, model: Vae, parameters: Mapping[str, Tensor], tap: Tap
    ) -> tuple[Tensor, Tensor]:
        """The terms of the bound: log-probabilities of the items `[C, B, items]`, and divergences
        `[C, B]`. For the first step of all clients under the same parameters: `[C, items]` and
        `[C]`."""
        shared = {name: value.unsqueeze(0) for name, value in parameters.items()}
        prior = (
            None if self.prior is None else Prior(self.prior.mean[:, 0], self.prior.variance[:, 0])
        )
        draw = Draw(self.retained[:1], self.noise[:1])
        log_chances, distances = model.parts(shared, self.histories.unsqueeze(0), draw, prior, tap)
        return log_chances[0], distances[0]


class HistoryObjective:
    """Negative evidence lower bound of each client.

    Args:
        model: the variational autoencoder.
        beta: weight of the divergence from the prior.
    """

    capturable = False  # with one epoch, as shipped, there is one step

    def __init__(self, model: Vae, beta: float) -> None:
        self.model = model
        self.beta = beta

    def __call__(
        self, parameters: Mapping[str, Tensor], block: Block, step: int, active: int
    ) -> Tensor:
        if not isinstance(block, HistoryBlock):
            raise TypeError(f"Expected a HistoryBlock, got {type(block).__name__}.")
        drawn = block.draw(step)
        prior = block.prior
        draw = Draw(drawn.mask[:active], drawn.noise[:active])
        prior = None if prior is None else Prior(prior.mean[:active], prior.variance[:active])
        histories = block.histories[:active, None]
        return self.model.negative_elbo(parameters, histories, draw, self.beta, prior)[:, 0]


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
        """The batches of one client, with the draws of each step; without a step nothing is
        trained. `drawn`, `int64 [J]`: see `HistoryBatches`; `examples`: default 1 with a step."""
        draws = [self.model.draw((1, 1), generator_of(random)) for _ in range(steps)]
        history = data.positives
        retained = np.array([draw.mask[0, 0].numpy()[history] for draw in draws], bool)
        noise = np.array([draw.noise[0, 0].numpy() for draw in draws], np.float32)
        return HistoryBatches(
            items=np.zeros((steps, 0), dtype=np.int64),
            labels=np.zeros((steps, 0), dtype=np.float32),
            sizes=np.zeros(steps, dtype=np.int64),
            examples=min(steps, 1) if examples is None else examples,
            last_epoch=min(steps, 1),
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
# A client is one example: its whole history. In each epoch it draws new dropout and a new code and
# takes one gradient step on minus the evidence lower bound. With one epoch the update is a
# gradient, and the server's optimiser does the rest; that is batch training with the cohort as the
# batch.
#
# Where this differs from the paper: it raises beta "gradually from 0 to 1" and keeps the best, here
# beta rises linearly over `anneal-rounds` rounds to `beta` and stays there (its table 3: 0.5 for
# MovieLens-100K).


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
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
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
        return BlockUpdate(parameters, block, outer_products(factors), reported)
