# SPDX-License-Identifier: Apache-2.0
"""Local training on whole histories, and that of the variational autoencoder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig
from clients.steps.own_noise import (
    ROUNDING,
    FactoredGradients,
    OwnNoiseConfig,
    OwnNoiseStep,
    Recorder,
)
from fedrec.data.client_data import ClientData
from fedrec.device import on_device
from fedrec.models.base import Parameters
from fedrec.models.priors import user_priors
from fedrec.models.vae import Draw, Prior, Tap, Vae
from fedrec.privacy.personal import PersonalNoise, PriorsConfig
from fedrec.training.block import Batches, Block, UserCodes
from fedrec.training.results import BlockUpdate, Dense, outer_products


@dataclass(frozen=True, eq=False)
class _HistoryBatches(Batches):
    """One client's work: a step on its history, or none.

    Attributes:
        history: `int64 [N]`, distinct items.
        amounts: `float32 [N]`, how much each is liked.
        retained: `bool [N]`, which of them dropout leaves in the step; none without a step.
        noise: `float32 [K]`, standard normal, for the code; zeros without a step.
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
class _HistoryBlock(Block):
    """A block of clients with histories.

    Attributes:
        histories: `float32 [C, items]`.
        retained: `bool [C, items]`.
        noise: `float32 [C, K]`.
        prior: `[C, K]`; None where every client has the standard one.
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
        """Make a block of clients from `_HistoryBatches`; the model determines the number of items
        and of random numbers."""
        members = [batch for batch in batches if isinstance(batch, _HistoryBatches)]
        if model is None or len(members) != len(batches):
            raise TypeError("Expected batches of histories and the model that they are for.")
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
            retained[index, batch.history] = batch.retained
            noise[index] = batch.noise
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
    def histories_of(self) -> list[_HistoryBatches]:
        """The clients' batches."""
        return [batch for batch in self.members if isinstance(batch, _HistoryBatches)]

    def parts(
        self, model: Vae, parameters: Mapping[str, Tensor], tap: Tap
    ) -> tuple[Tensor, Tensor]:
        """The terms of the bound: log-probabilities of the items `[C, B, items]`, and divergences
        `[C, B]`. For all clients under the same parameters: `[C, items]` and `[C]`."""
        shared = {name: value.unsqueeze(0) for name, value in parameters.items()}
        draw = Draw(self.retained[None], self.noise[None])
        histories = self.histories.unsqueeze(0)
        log_chances, distances = model.parts(shared, histories, draw, self.prior, tap)
        return log_chances[0], distances[0]


def _prior(batches: Sequence[_HistoryBatches], device: torch.device) -> Prior | None:
    priors = [batch.prior for batch in batches if batch.prior is not None]
    if len(priors) != len(batches):
        return None
    mean, variance = (
        on_device(np.stack(part).astype(np.float32), device) for part in zip(*priors, strict=True)
    )
    return Prior(mean, variance)


class _HistoryStepConfig(StepConfig):
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


class _HistoryStep(Step):
    """Base of steps that train the variational autoencoder on a client's own history."""

    trains = Vae
    model: Vae
    config: _HistoryStepConfig

    def __init__(self, config: _HistoryStepConfig, model: Vae, device: torch.device) -> None:
        super().__init__(config, model, device)
        noise = config if isinstance(config, PersonalNoise) else None
        self.priors = user_priors(config.priors, noise, model)

    def block(self, users: UserCodes, batches: Sequence[Batches], device: torch.device) -> Block:
        return _HistoryBlock.of(users, batches, device, self.model)

    def _history_batches(
        self,
        data: ClientData,
        steps: int,
        random: np.random.Generator,
        drawn: np.ndarray | None = None,
        examples: int | None = None,
    ) -> _HistoryBatches:
        """The batches of one client, with the draws of its step; with `steps = 0`
        nothing is trained. `drawn`, `int64 [J]`: see `_HistoryBatches`; `examples`: default
        `steps`."""
        history = data.positives
        retained = np.zeros(len(history), bool)
        noise = np.zeros(self.model.config.latent, np.float32)
        if steps:
            draw = self.model.draw((1, 1), generator_of(random))
            retained = draw.mask[0, 0].numpy()[history]
            noise = draw.noise[0, 0].numpy()
        return _HistoryBatches(
            items=np.zeros((steps, 0), dtype=np.int64),
            labels=np.zeros((steps, 0), dtype=np.float32),
            sizes=np.zeros(steps, dtype=np.int64),
            examples=steps if examples is None else examples,
            last_epoch=steps,
            history=history,
            amounts=data.amounts(self.model.form.rated),
            retained=retained,
            noise=noise,
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


class VaeStepConfig(_HistoryStepConfig):
    """Settings of local training of the variational autoencoder."""

    learning_rate: float = Field(default=0.01, gt=0)
    """Step size on the device; of no effect on the result with an adaptive server."""


class VaeStep(_HistoryStep):
    """Gradient steps on one client's evidence lower bound."""

    name = "vae"
    Config = VaeStepConfig
    paper = "DP-VAE (Fang et al. 2022), eq. 7 and 19"
    config: VaeStepConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """The step of one client; none for a client without a positive item."""
        return self._history_batches(data, self.config.epochs * bool(len(data.positives)), random)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block, by one backward pass."""
        config = self.config
        if not isinstance(block, _HistoryBlock):
            raise TypeError(f"Expected a block of histories, got {type(block).__name__}.")
        recorder = Recorder()
        trains = block.histories.any(1) & bool(config.epochs)
        log_chances, distances = block.parts(self.model, parameters, recorder)
        losses = config.beta * distances - (log_chances * block.histories).sum(-1)
        rates = torch.where(trains, -config.learning_rate, 0.0).double()
        factors = recorder.gradients(losses[:, None]).weighted(rates[None])
        reported = torch.where(trains, losses.detach(), math.nan)
        return BlockUpdate(parameters, block, outer_products(factors), reported)


# Training of the variational autoencoder under the user's own noise (Fang et al. 2022, algorithm
# 3, lines 3 to 16).
#
# The device draws J of its interactions, takes the gradient of each one's part of minus the
# evidence lower bound, clips each over all parameters together, takes their mean, and adds Gaussian
# noise to every coordinate. The server sees nothing else. The guarantee depends on `mode`:
#
# - `sound`: the bound S does not depend on any user's data. A user's upload has norm at most S
#   before the noise, whatever its data; the cost of n uploads is in `fedrec.privacy.personal`. With
#   `participations` the noise is set so that this number of uploads together costs epsilon_k, and
#   the device makes no more; without, epsilon_k is the cost of one upload, by the paper's formula.
#   The loss stays on the device.
# - `paper`: algorithm 3 to the letter, S by algorithm 2 from the user's gradients. No finite
#   guarantee: the clip norm comes from private data.
#
# Where this differs from the paper:
#
# - Line 4 draws z from the prior, with which the encoder would never learn; z is drawn from the
#   encoder, as in its section 2.3.
# - The paper does not define an example x_kj; here it is one interaction, and the encoder gets the
#   whole history. Each of a user's N interactions carries 1 / N of the divergence, so that the mean
#   over all examples is 1 / N of the bound.
# - A user with fewer than J interactions takes all; one without any uploads only noise, because no
#   upload would reveal that.
# - `clip = "user"` clips the mean of the examples' gradients instead of each. A user's influence is
#   bounded by S either way, but clipped gradients of different interactions are nearly orthogonal,
#   so that their mean is shorter than S by a factor of up to sqrt(J), for the same noise.
# - `weighting = "precision"` multiplies an upload by the precision of its noise, which is public,
#   which minimises the variance of the mean; in the paper's plain mean, the noise of users who ask
#   for an epsilon near zero dominates.


class DpVaeConfig(_HistoryStepConfig, OwnNoiseConfig):
    """Settings of training under the user's own noise; with `epochs = 1` a user makes one upload in
    a round, as in algorithm 3."""


class DpVae(_HistoryStep, OwnNoiseStep):
    """One noisy gradient of a user."""

    name = "dpvae"
    Config = DpVaeConfig
    paper = "DP-VAE (Fang et al. 2022), algorithm 3"
    config: DpVaeConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work; the noise is drawn from its stream when it is
        added."""
        number = len(data.positives)
        drawn = data.positives[:0]
        if number and self.config.epochs:
            count = min(self.config.examples, number)
            drawn = random.choice(data.positives, size=count, replace=False)
        return self._history_batches(data, int(len(drawn) > 0), random, drawn=drawn, examples=1)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block. One backward pass for all examples of all clients."""
        if not isinstance(block, _HistoryBlock):
            raise TypeError(f"Expected a block of histories, got {type(block).__name__}.")
        recorder = Recorder()
        losses, real = self._losses(parameters, block, recorder)
        gradients = recorder.gradients(losses)
        bounds = self._bounds(gradients, block, real, parameters)
        norms = gradients.norms()
        counts = real.sum(1).clamp(min=1)
        factors = torch.where(norms > bounds, bounds * ROUNDING / norms, 1.0)
        usable = real.T & norms.isfinite()
        if self.config.noise == "summed":
            return self._summed(
                parameters, block, gradients, torch.where(usable, factors, 0.0) / counts, bounds
            )
        changes = self._noise(parameters, block, bounds)
        weights = torch.where(usable, factors, 0.0) / counts
        rates = torch.tensor([self.rate(member.client) for member in block.histories_of])
        scale = (-self.config.epochs * rates).to(weights)[:, None]
        for name, (inputs, weighted) in gradients.weighted(weights).items():
            # in float64 the sums below would take ten times as long
            moved = scale.to(weighted) * weighted
            changes[f"{name}.weight"].addcmul_(inputs[:, :, None], moved[:, None, :])
            changes[f"{name}.bias"].add_(moved)
        reported = torch.where(real, losses.detach(), 0.0).sum(1) / real.sum(1)
        if self.config.mode == "sound":
            reported = torch.full_like(reported, math.nan)
        dense = {name: Dense(change.float()) for name, change in changes.items()}
        return BlockUpdate(parameters, block, dense, reported)

    def _noise(
        self, parameters: Parameters, block: _HistoryBlock, bounds: Tensor
    ) -> dict[str, Tensor]:
        """The noise of every client's upload, `[C, ...]` for each parameter: views of one array, in
        which it is drawn."""
        sizes = [value.numel() for value in parameters.values()]
        new = torch.empty if self.config.epochs else torch.zeros
        flat = new(len(block), sum(sizes), dtype=self.noise_dtype)
        members = zip(block.histories_of, bounds.tolist(), strict=True)
        for index, (member, bound) in enumerate(members if self.config.epochs else ()):
            normal = self.normal(member.random)
            normal(flat[index]).mul_(self.noise_std(member.client, bound))
        parts = on_device(flat, self.device).split(sizes, dim=1)
        return {
            name: part.view(len(block), *value.shape)
            for (name, value), part in zip(parameters.items(), parts, strict=True)
        }

    def _summed(
        self,
        parameters: Parameters,
        block: _HistoryBlock,
        gradients: FactoredGradients,
        weights: Tensor,
        bounds: Tensor,
    ) -> BlockUpdate:
        """The block as one noisy sum; `weights [J, C]` are those of the examples in each client's
        clipped mean, `bounds [C]` the clip norms."""
        clients = [member.client for member in block.histories_of]
        config = self.config
        weights_of = torch.tensor([config.upload_weight(client) for client in clients]).double()
        rates = config.learning_rate * weights_of
        multipliers = torch.tensor([config.noise_multiplier(client) for client in clients])
        stds = multipliers * bounds.cpu() * rates * config.epochs
        factors = gradients.weighted(-rates.to(weights) * weights)
        losses = (math.nan,) * len(block)
        return BlockUpdate(parameters, block, outer_products(factors), losses, noise_stds=stds)

    def _losses(
        self, network: Mapping[str, Tensor], block: _HistoryBlock, recorder: Recorder
    ) -> tuple[Tensor, Tensor]:
        """Losses whose gradients are clipped separately, `[C, J]` (or `[C, 1]`), and a mask of
        those that exist, `bool` of the same shape."""
        log_chances, distances = block.parts(self.model, network, recorder)
        numbers = torch.tensor(
            [max(1, len(member.history)) for member in block.histories_of], device=distances.device
        )
        each = (self.config.beta / numbers * distances)[:, None] - log_chances.gather(
            1, block.drawn
        )
        real = torch.arange(each.shape[1], device=each.device) < block.drawn_counts[:, None]
        if self.config.clip == "examples":
            return each, real
        mean = (
            torch.where(real, each, 0.0).sum(1, keepdim=True)
            / block.drawn_counts.clamp(min=1)[:, None]
        )
        return mean, (block.drawn_counts > 0)[:, None]

    def _bounds(
        self,
        gradients: FactoredGradients,
        block: _HistoryBlock,
        real: Tensor,
        parameters: Mapping[str, Tensor],
    ) -> Tensor:
        """The clip norm of each client, `float64 [C]`."""
        if self.config.mode == "sound":
            size = (len(real),)
            return torch.full(size, self.config.clip_norm, dtype=torch.float64, device=real.device)
        coordinates = sum(value.numel() for value in parameters.values())
        bounds = []
        for index, member in enumerate(block.histories_of):
            rows, counts = gradients.rows(index, int(real[index].sum()))
            bounds.append(self.bound(rows, member.client, counts, coordinates))
        return torch.tensor(bounds, dtype=torch.float64, device=real.device)
