# SPDX-License-Identifier: Apache-2.0
"""A denoising autoencoder trained centrally by DP-SGD on users (DPAE of Fang et al. 2022, tables 8
and 11).

A user's loss is the multinomial one over its whole history. The user enters every affine layer
once, as one row x, so its gradient is an outer product x^T g, and no user's gradient needs to be
materialised (Goodfellow 2015).

Where this differs from the paper: Fang et al. give every user an epsilon of its own and noise of
its own for one upload (`clients/steps/dpvae.py` with model `ae` does that, with the paper's clip
norm from private gradients as an option); here one epsilon is for all steps and holds for all data
of a user. Adam instead of plain gradient descent.
"""

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines.base import Histories
from fedrec.baselines.private.dpsgd._outer import OuterGradients
from fedrec.baselines.private.dpsgd._sampled import DpSgdBaseline, DpSgdBaselineConfig
from fedrec.config import Width
from fedrec.data.features import FeatureTable
from fedrec.data.schema import Schema
from fedrec.models.ae import Ae, AeConfig
from fedrec.privacy.noise_source import NoiseSource


class DpAeConfig(DpSgdBaselineConfig):
    """Settings of the private autoencoder."""

    hidden: Width = 80
    """Width of the hidden layers of encoder and decoder."""
    latent: Width = 20
    """Width of the code (paper: 20, 30 and 50)."""
    dropout: float = Field(default=0.5, ge=0, lt=1)
    """Share of a user's items that are hidden from the encoder while it trains."""


class DpAe(DpSgdBaseline):
    """Trained on clipped gradients of users, under noise."""

    name = "dpae"
    Config = DpAeConfig
    paper = "DP-VAE (Fang et al. 2022), tables 8 and 11, DPAE"
    config: DpAeConfig
    stream = "baseline-dpae"

    def start(self, histories: Histories, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters, on the device."""
        config = self.config
        network = AeConfig(hidden=config.hidden, latent=config.latent, dropout=config.dropout)
        schema = Schema(histories.num_items, FeatureTable(histories.num_items, ()), (), "ranking")
        self._model = Ae(network, schema)
        return {
            name: value.to(self.device) for name, value in self._model.initial(generator).items()
        }

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Logits of the items, `float32 [users, items]`."""
        parameters = {name: value.unsqueeze(0) for name, value in self._parameters.items()}
        return self._model.history_scores(
            parameters, histories.matrix().to(self.device).unsqueeze(0)
        )[0]

    def kept(
        self, users: np.ndarray, step: int, source: NoiseSource, generator: torch.Generator
    ) -> Tensor:
        """`bool [users, items]`: the items that dropout keeps in a step; in mode `secure` drawn for
        each user from the operating system's generator, else by place in the cohort from the
        seed."""
        if self.config.mode == "reproducible":
            return self._model.draw((1, len(users)), generator).kept[0]
        kept = np.empty((len(users), self._model.schema.num_items), dtype=bool)
        for row, user in zip(kept, users, strict=True):
            drawn = source.uniform(len(row), f"{self.stream}/dropout", step, int(user))
            np.greater_equal(drawn, self.config.dropout, out=row)
        return torch.from_numpy(kept)

    def gradients(
        self, parameters: dict[str, Tensor], rows: Tensor, kept: Tensor | None
    ) -> OuterGradients:
        """Gradients of the losses of some users, given by `rows`, `float32 [users, items]`."""
        inputs = {}
        outputs = {}

        def record(name: str, entering: Tensor, leaving: Tensor) -> Tensor:
            inputs[name] = entering.detach()[0]
            outputs[name] = leaving
            return leaving

        leaves = {
            name: value.detach().unsqueeze(0).requires_grad_() for name, value in parameters.items()
        }
        codes = self._model.code(
            leaves, rows.unsqueeze(0), None if kept is None else kept.unsqueeze(0), record
        )
        log_chances = torch.log_softmax(self._model.decode(leaves, codes, record), -1)
        loss = -(log_chances[0] * rows).sum()
        found = torch.autograd.grad(loss, list(outputs.values()))
        pairs = {}
        once = rows.new_ones(len(rows), 1)
        for name, gradient in zip(outputs, found, strict=True):
            pairs[f"{name}.weight"] = (inputs[name], gradient[0])
            pairs[f"{name}.bias"] = (gradient[0], once)
        return OuterGradients(pairs)
