# SPDX-License-Identifier: Apache-2.0
"""Training of the variational autoencoder under the user's own noise (Fang et al. 2022, algorithm
3, lines 3 to 16).

The device draws J of its interactions, takes the gradient of each one's part of minus the evidence
lower bound, clips each over all parameters together, takes their mean, and adds Gaussian noise to
every coordinate. The server sees nothing else. The guarantee depends on `mode`:

- `sound`: the bound S does not depend on any user's data. A user's upload has norm at most S before
  the noise, whatever its data; the cost of n uploads is in `fedrec.privacy.personal`. With
  `participations` the noise is set so that this number of uploads together costs epsilon_k, and the
  device makes no more; without, epsilon_k is the cost of one upload, by the paper's formula. The
  loss stays on the device.
- `paper`: algorithm 3 to the letter, S by algorithm 2 from the user's gradients. No finite
  guarantee: the clip norm comes from private data.

Where this differs from the paper:

- Line 4 draws z from the prior, with which the encoder would never learn; z is drawn from the
  encoder, as in its section 2.3.
- The paper does not define an example x_kj; here it is one interaction, and the encoder gets the
  whole history. Each of a user's N interactions carries 1 / N of the divergence, so that the mean
  over all examples is 1 / N of the bound.
- A user with fewer than J interactions takes all; one without any uploads only noise, because no
  upload would reveal that.
- `clip = "user"` clips the mean of the examples' gradients instead of each. A user's influence is
  bounded by S either way, but clipped gradients of different interactions are nearly orthogonal, so
  that their mean is shorter than S by a factor of up to sqrt(J), for the same noise.
- `weighting = "precision"` multiplies an upload by the precision of its noise, which is public,
  which minimises the variance of the mean; in the paper's plain mean, the noise of users who ask
  for an epsilon near zero dominates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clients.steps.own_noise import (
    ROUNDING,
    FactoredGradients,
    OwnNoiseConfig,
    OwnNoiseStep,
    Recorder,
)
from clients.steps.vae import HistoryBlock, HistoryStep, HistoryStepConfig
from fedrec.data.client_data import ClientData
from fedrec.device import on_device
from fedrec.models.base import Parameters
from fedrec.training.block import Batches, Block
from fedrec.training.results import BlockUpdate, Dense, outer_products


class DpVaeConfig(HistoryStepConfig, OwnNoiseConfig):
    """Settings of training under the user's own noise; with `epochs = 1` a user makes one upload in
    a round, as in algorithm 3."""


class DpVae(HistoryStep, OwnNoiseStep):
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
        return self.history_batches(data, int(len(drawn) > 0), random, drawn=drawn, examples=1)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block. One backward pass for all examples of all clients."""
        if not isinstance(block, HistoryBlock):
            raise TypeError(f"Expected a HistoryBlock, got {type(block).__name__}.")
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
        self, parameters: Parameters, block: HistoryBlock, bounds: Tensor
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
        block: HistoryBlock,
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
        self, network: Mapping[str, Tensor], block: HistoryBlock, recorder: Recorder
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
        block: HistoryBlock,
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
