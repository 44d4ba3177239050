# SPDX-License-Identifier: Apache-2.0
"""A denoising autoencoder trained centrally by DP-SGD on users (DPAE of Fang et al. 2022, tables 8 and 11).

In every step some users are drawn, each user's gradient of its multinomial loss over the whole history is clipped to
norm S over all parameters together, the sum gets Gaussian noise once, and Adam moves the parameters (Abadi et al. 2016
with users for examples, as McMahan et al. 2018). Cohorts are of fixed size under replace-one, and Poisson under
add-remove, which is what their amplification is proven for. Gradients have signs, so replace-one costs 2 S.

A user enters every affine layer once, as one row x, so that its gradient is an outer product x^T g. Norms and clipped
sums come from x and g (Goodfellow 2015), and no user's gradient is ever made.

Where this differs from the paper: Fang et al. give every user an epsilon of its own and noise of its own for one upload
(`clients/steps/dpvae.py` with model `ae` does that, with the paper's clip norm from private gradients as an option);
here one epsilon is for all steps and holds for all data of a user. Adam instead of plain gradient descent.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines._private import Part, PrivateBaseline, PrivateConfig
from fedrec.baselines.base import Histories
from fedrec.data.features import FeatureTable
from fedrec.models.ae import Ae, AeConfig
from fedrec.models.base import Schema
from fedrec.privacy.clipping import Clip
from fedrec.privacy.mechanisms import secure_fixed_size, secure_poisson
from fedrec.rng import stream, torch_stream


class DpAeConfig(PrivateConfig):
    """Settings of the private autoencoder."""

    hidden: int = Field(default=80, ge=1)
    """Width of the hidden layers of encoder and decoder."""
    latent: int = Field(default=20, ge=1)
    """Width of the code (paper: 20, 30 and 50)."""
    dropout: float = Field(default=0.5, ge=0, lt=1)
    """Share of a user's items that are hidden from the encoder while it trains."""
    steps: int = Field(default=100, ge=1)
    """Gradient steps, each of which is a release."""
    cohort: int = Field(default=500, ge=1)
    """Users per step, expected under add-remove; at most all."""
    clip_norm: float = Field(default=1.0, gt=0)
    """S, bound on the L2 norm of a user's gradient."""
    learning_rate: float = Field(default=0.003, gt=0)
    """Step size of Adam."""


class DpAe(PrivateBaseline):
    """Trained on clipped gradients of users, under noise."""

    Config = DpAeConfig
    paper = "DP-VAE (Fang et al. 2022), tables 8 and 11, DPAE"
    config: DpAeConfig

    def parts(self) -> tuple[Part, ...]:
        """One sum of gradients per step."""
        return (Part("gradients", self.config.clip_norm, releases=self.config.steps),)

    def sampler(self, users: int) -> tuple[str, dict[str, float]]:
        """See `PrivateBaseline.sampler`."""
        name = "fixed-size" if self.config.adjacency == "replace-one" else "poisson"
        return name, {"cohort": min(self.config.cohort, users)}

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters."""
        config, generator = self.config, torch_stream(self.config.own_seed, "baseline-dpae")
        releases, schema = (
            self.releases(histories.num_users),
            Schema(histories.num_items, FeatureTable(histories.num_items, ()), (), "ranking"),
        )
        network = AeConfig(hidden=config.hidden, latent=config.latent, dropout=config.dropout)
        self._model = Ae(network, schema)
        self._parameters = {n: v.to(self.device) for n, v in self._model.initial(generator).items()}
        adam = torch.optim.Adam(self._parameters.values(), lr=config.learning_rate)
        denominator = releases.plans["gradients"].denominator
        for step in range(config.steps):
            cohort = self._cohort(histories.num_users, step)
            total = self.clipped_sum(_rows(histories, cohort).to(self.device), generator)
            noisy = releases.release("gradients", torch.cat([v.flatten() for v in total.values()]).cpu().numpy())
            parts = torch.from_numpy(noisy / np.float32(denominator)).to(self.device)
            pieces = parts.split([value.numel() for value in total.values()])
            for (name, value), piece in zip(self._parameters.items(), pieces, strict=True):
                value.grad = piece.view_as(value) if name in total else None
            adam.step()

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Logits of the items, `float32 [users, items]`."""
        parameters = {name: value.unsqueeze(0) for name, value in self._parameters.items()}
        return self._model.history_scores(parameters, histories.matrix().to(self.device).unsqueeze(0))[0]

    def clipped_sum(self, rows: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Sum of the users' clipped gradients, by parameter and in its shape.

        Args:
            rows: binary `float32 [users, items]`.
            generator: of dropout.
        """
        inputs, outputs = {}, {}

        def record(name: str, entering: Tensor, leaving: Tensor) -> Tensor:
            inputs[name], outputs[name] = entering.detach()[0], leaving
            return leaving

        leaves = {name: value.detach().unsqueeze(0).requires_grad_() for name, value in self._parameters.items()}
        draw = self._model.draw((1, len(rows)), generator).to(self.device)
        log_chances, _ = self._model.parts(leaves, rows.unsqueeze(0), draw, tap=record)
        loss = -(log_chances[0] * rows).sum()
        found = torch.autograd.grad(loss, list(outputs.values()))
        gradients = dict(zip(outputs, (gradient[0] for gradient in found), strict=True))
        squares = [(inputs[n].double().square().sum(1) + 1) * g.double().square().sum(1) for n, g in gradients.items()]
        norms = torch.stack(squares).sum(0).sqrt()
        shares = torch.from_numpy(Clip(self.config.clip_norm).factors(norms.cpu().numpy())).to(self.device)
        total = {}
        for name, gradient in gradients.items():
            # A failed user has factor 0; NaN times 0 would be NaN.
            clipped = torch.where(shares[:, None] > 0, gradient * shares[:, None], 0.0).float()
            total[f"{name}.weight"], total[f"{name}.bias"] = inputs[name].T @ clipped, clipped.sum(0)
        return {name: total[name] for name in self._parameters}

    def _cohort(self, users: int, step: int) -> np.ndarray:
        name, settings = self.sampler(users)
        everybody, cohort = np.arange(users), int(settings["cohort"])
        if self.config.mode == "secure":
            return (
                secure_fixed_size(everybody, cohort)
                if name == "fixed-size"
                else secure_poisson(everybody, cohort / users)
            )
        random = stream(self.config.own_seed, "baseline-dpae/cohort", step)
        if name == "fixed-size":
            return np.sort(random.choice(users, cohort, replace=False))
        return np.flatnonzero(random.random(users) < cohort / users)


def _rows(histories: Histories, users: np.ndarray) -> Tensor:
    """Binary `float32 [users, items]` of some users."""
    rows = torch.zeros(len(users), histories.num_items)
    for place, user in enumerate(users.tolist()):
        rows[place, torch.from_numpy(histories.items[histories.offsets[user] : histories.offsets[user + 1]])] = 1.0
    return rows
