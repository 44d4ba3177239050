# SPDX-License-Identifier: Apache-2.0
"""Training of the variational autoencoder under the user's own noise (Fang et al. 2022, algorithm 3, lines 3 to 16).

The device draws J of its interactions, takes the gradient of each one's part of minus the evidence lower bound, clips
each over all parameters together, takes their mean, and adds Gaussian noise to every coordinate. The server sees
nothing else. `mode` decides what that is worth:

- `sound`: a fixed bound S. A user's upload has norm at most S before the noise, whatever its data; what n uploads cost
  is in `fedrec.privacy.personal`. With `participations` the noise is such that so many uploads together cost epsilon_k
  (use the sampler `limited`, which draws nobody more often); without, epsilon_k is that of one upload alone, by the
  paper's formula. The loss stays on the device.
- `paper`: algorithm 3 to the letter, S by algorithm 2 from the user's gradients. No finite guarantee: the clip norm
  comes from private data.

Noise comes from the client's stream, a function of the seed: this is a simulation, not a release.

Where this differs from the paper:

- Line 4 draws z from the prior, with which the encoder would never learn; z is drawn from the encoder, as in its
  section 2.3.
- What an example x_kj is, is not said; here it is one interaction, with the whole history at the encoder. The
  divergence counts 1 / N for each of a user's N interactions, so that the mean over all examples is 1 / N of the bound.
- A user with fewer than J interactions takes all; one without any uploads noise alone, as its silence would tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.steps.base import Step, StepConfig, Update
from clients.steps.vae import annealed, generator_of, needs_vae
from fedrec.data.population import ClientData
from fedrec.models.base import Model
from fedrec.privacy.optimal_clip import optimal_clip
from fedrec.privacy.personal import PersonalBudget, drawn_budget

_ROUNDING = 1 - 1e-6  # so that a clipped gradient's norm in float32 is not above the bound


class DpVaeConfig(StepConfig):
    """Settings of training under the user's own noise."""

    epochs: int = Field(default=1, ge=0, le=1)
    """1: one upload per round, as algorithm 3 has it; 0 trains nothing."""
    mode: Literal["sound", "paper"] = "sound"
    """Fixed clip norm, or the paper's, which comes from private data and guarantees nothing finite."""
    examples: int = Field(default=10, ge=1)
    """J, interactions that a user draws in a round, without replacement."""
    clip_norm: float = Field(default=1.5, gt=0)
    """S with mode `sound`, of each example's gradient (paper: constant bounds of 1.5 and 2)."""
    epsilon: float = Field(default=1.0, gt=0)
    """The users' epsilon, or the largest where they are drawn (paper: 1)."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The users' delta (paper: 1 / number of training rows)."""
    budgets: Literal["uniform", "equal"] = "uniform"
    """Whether each user's epsilon is drawn from (0, epsilon] (paper), or is the same for all."""
    budget_seed: int = Field(default=0, ge=0)
    """Of the drawn budgets."""
    participations: int | None = Field(default=None, ge=1)
    """Uploads that epsilon_k is to pay for, all together; None: one upload alone, as in the paper."""
    learning_rate: float = Field(default=0.005, gt=0)
    """Step size eta (paper: 0.005)."""
    beta: float = Field(default=0.5, ge=0)
    """Weight of the divergence from the prior after annealing (paper: 0.5 for MovieLens-100K)."""
    anneal_rounds: int = Field(default=0, ge=0)
    """Rounds over which beta rises linearly from 0; 0 starts with all of it."""


class DpVae(Step):
    """One noisy gradient of a user."""

    Config = DpVaeConfig
    paper = "DP-VAE (Fang et al. 2022), algorithm 3"
    config: DpVaeConfig

    def __init__(self, config: DpVaeConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.vae = needs_vae(model)

    def in_round(self, round_number: int) -> DpVae:
        """See `Step.in_round`: with the round's beta."""
        beta = annealed(self.config.beta, self.config.anneal_rounds, round_number)
        return DpVae(self.config.model_copy(update={"beta": beta}), self.model, self.device)

    def budget(self, client: int) -> PersonalBudget:
        """What a user asked for."""
        config = self.config
        if config.budgets == "equal":
            return PersonalBudget(config.epsilon, config.delta)
        return drawn_budget(config.budget_seed, client, config.epsilon, config.delta)

    def noise_multiplier(self, client: int) -> float:
        """Standard deviation of a user's noise / S."""
        budget, uploads = self.budget(client), self.config.participations
        return budget.paper_multiplier if uploads is None else budget.multiplier(uploads)

    def update(self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator) -> Update:
        """See `Step.update`; examples and, where the mode is sound, the loss say nothing of the user."""
        if self.config.epochs == 0:
            return Update({name: torch.zeros_like(value) for name, value in parameters.items()}, 1, math.nan)
        gradients, loss = self.gradients(parameters, data, random)
        multiplier = self.noise_multiplier(data.client)
        paper = self.config.mode == "paper"
        bound = optimal_clip(gradients, multiplier) if paper and len(gradients) else self.config.clip_norm
        mean = clipped_mean(gradients, bound).cpu().numpy().astype(np.float64)
        noisy = mean + multiplier * bound * random.standard_normal(len(mean))
        delta = torch.from_numpy((-self.config.learning_rate * noisy).astype(np.float32)).to(self.device)
        parts = delta.split([value.numel() for value in parameters.values()])
        shaped = {n: part.view(v.shape) for (n, v), part in zip(parameters.items(), parts, strict=True)}
        return Update(shaped, 1, loss if paper else math.nan)

    def gradients(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> tuple[Tensor, float]:
        """The gradients of a user's examples, `float32 [J, l]`, all parameters end to end, and the mean loss."""
        number = len(data.positives)
        if not number:
            return torch.zeros(0, sum(v.numel() for v in parameters.values()), device=self.device), math.nan
        items = random.choice(data.positives, size=min(self.config.examples, number), replace=False)
        history = self.vae.history(data.positives).to(self.device)
        draw = self.vae.draw((1, 1), generator_of(random)).to(self.device)
        leaves = {name: value.detach().unsqueeze(0).requires_grad_() for name, value in parameters.items()}
        targets = torch.zeros(1, len(items), self.vae.schema.num_items, device=self.device)
        targets[0, torch.arange(len(items)), torch.from_numpy(items)] = 1.0
        losses = self.vae.negative_elbo(leaves, history, draw, self.config.beta / number, targets=targets)[0]
        each = torch.eye(len(items), device=self.device)
        found = torch.autograd.grad(losses, list(leaves.values()), each, is_grads_batched=True)
        return torch.cat([gradient.flatten(1) for gradient in found], 1), float(losses.detach().mean())


def clipped_mean(gradients: Tensor, bound: float) -> Tensor:
    """Mean `[l]` of gradients `[J, l]`, each scaled to at most that norm (lines 12 and 14); zero where there is none.

    A gradient that is not a number counts as zero.
    """
    if not len(gradients):
        return gradients.new_zeros(gradients.shape[1])
    norms = gradients.double().norm(dim=1)
    known = torch.where(norms.isfinite()[:, None], gradients, 0.0)
    factors = torch.where(norms > bound, bound * _ROUNDING / norms, 1.0)
    return (known * torch.where(norms.isfinite(), factors, 0.0).float()[:, None]).mean(0)
