# SPDX-License-Identifier: Apache-2.0
"""The central variational autoencoder (Liang et al. 2018), the reference for the federated one.

Where this differs from the papers: Fang et al. name plain gradient descent and a learning rate of
0.005, with which the network hardly learns in 30 epochs of MovieLens-100K; Adam is used, as in
Liang et al. Beta rises linearly to its last value over all steps.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from fedrec.baselines.base import Baseline, Histories
from fedrec.data.features import FeatureTable
from fedrec.data.schema import Schema
from fedrec.models.vae import Vae as VaeModel
from fedrec.models.vae import VaeConfig as VaeModelConfig
from fedrec.rng import torch_stream


class VaeConfig(VaeModelConfig):
    """Settings of the central variational autoencoder, in addition to those of the network."""

    epochs: int = Field(default=60, ge=1)
    """Epochs over the users."""
    batch_size: int = Field(default=10, ge=1)
    """Users per gradient step (paper: 10 for MovieLens-100K)."""
    learning_rate: float = Field(default=0.001, gt=0)
    """Learning rate of Adam."""
    beta: float = Field(default=0.5, ge=0)
    """Final weight beta of the divergence from the prior (paper: 0.5 for MovieLens-100K)."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial parameters, the order of users, dropout and codes."""


class Vae(Baseline):
    """Trained with Adam on batches of users."""

    Config = VaeConfig
    paper = "Mult-VAE (Liang et al. 2018)"
    network: ClassVar[type[VaeModel]] = VaeModel
    config: VaeConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters; users without a positive item are left out."""
        config = self.config
        generator = torch_stream(self.config.seed, "baseline-vae")
        self._model = self.network(
            config,
            Schema(histories.num_items, FeatureTable(histories.num_items, ()), (), "ranking"),
        )
        fresh = self._model.initial(generator)
        self._parameters = {
            name: value.unsqueeze(0).to(self.device).requires_grad_()
            for name, value in fresh.items()
        }
        adam = torch.optim.Adam(self._parameters.values(), lr=config.learning_rate)
        users = torch.from_numpy(histories.offsets).diff().nonzero()[:, 0]
        batches = -(-len(users) // config.batch_size)
        for epoch in range(config.epochs):
            order = users[torch.randperm(len(users), generator=generator)]
            for place, batch in enumerate(order.split(config.batch_size)):
                beta = config.beta * (epoch * batches + place + 1) / (config.epochs * batches)
                draw = self._model.draw((1, len(batch)), generator).to(self.device)
                rows = histories.take(batch.numpy()).matrix().unsqueeze(0).to(self.device)
                loss = self._model.negative_elbo(self._parameters, rows, draw, beta).mean()
                adam.zero_grad()
                loss.backward()
                adam.step()

    @torch.no_grad()
    def scores(self, histories: Histories) -> torch.Tensor:
        """Logits at the mean of each user's code, `float32 [users, items]`."""
        rows = histories.matrix().unsqueeze(0).to(self.device)
        return self._model.history_scores(self._parameters, rows)[0]
