# SPDX-License-Identifier: Apache-2.0
"""DP-SGD under the user's own noise for models that predict item by item (Fang et al. 2022, section
4.2.6, table 11).

Algorithm 3 with another model: the device draws J of its examples, takes the gradient of each one's
loss with respect to the shared parameters, clips each, by a constant or by algorithm 2, takes their
mean and adds Gaussian noise to every coordinate. For the guarantee of each `mode` see
`clients.steps.vae`; it trains the autoencoder of that table.

Parameters that stay on the device (`private-parameters`) are fitted there first, for `epochs`
passes over the client's examples while the shared ones stay fixed. They are never sent, so they
cost no privacy. With `upload = false` nothing else is done; devices adapt in this way before they
are evaluated: `evaluation.fine-tune = {upload = false}`.

Where this differs from the paper:

- The paper does not define an example, nor which model is decomposed. Here an example is a labelled
  item, a positive or a drawn negative (or a rating), and users' factors are private, as in
  federated matrix factorization.
- The regularisation of 0.02 is left out. It would add a public vector, because the shared
  parameters are public.
"""

import math
from collections.abc import Mapping
from typing import Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from clients.step import PrivateParameters, private_names
from clients.steps.descent import Update, one_by_one
from clients.steps.own_noise import OwnNoiseConfig, OwnNoiseStep, clipped_mean
from fedrec.data.client_data import ClientData
from fedrec.models.base import Parameters
from fedrec.training.block import UNLIMITED, Block
from fedrec.training.draws import ExampleDraw
from fedrec.training.results import BlockUpdate

Examples = tuple[np.ndarray, np.ndarray]
"""Items `int64 [n]` and labels `float32 [n]`."""
_EXAMPLES = ExampleDraw(1, UNLIMITED, negatives=4)
_BATCH = 32  # examples per gradient step on the private parameters


class DpSgdConfig(OwnNoiseConfig, PrivateParameters):
    """Settings of DP-SGD under the user's own noise."""

    epochs: int = Field(default=5, ge=0)
    """Passes over the local examples that fit the private parameters; 0 trains nothing and uploads
    nothing."""
    upload: bool = True
    """Whether the shared parameters learn; false fits the private ones alone."""
    private_rate: float = Field(default=0.1, gt=0)
    """Step size on the private parameters."""

    @property
    def uploads(self) -> int | None:
        return super().uploads if self.upload else None

    @model_validator(mode="after")
    def _the_autoencoder_alone(self) -> Self:
        if self.priors is not None:
            raise ValueError("priors with step 'dpvae' only: they are of users' codes")
        if self.noise == "summed":
            raise ValueError("noise = 'summed' with step 'dpvae' only")
        return self


class DpSgd(OwnNoiseStep):
    """One noisy gradient of the shared parameters."""

    name = "dpsgd"
    Config = DpSgdConfig
    paper = "DP-VAE (Fang et al. 2022), algorithm 3 and table 11"
    config: DpSgdConfig

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block. In mode `sound` the reported number of examples and the
        loss are constants, so that they reveal nothing of the user."""
        return one_by_one(parameters, block, client_params, self._upload)

    def _upload(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        delta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        if not self.config.epochs:
            return Update(delta, 1, math.nan)
        examples = _EXAMPLES.examples(data, self.model.schema, random)
        fitted = self._fitted(parameters, data, examples, random)
        delta |= {name: value - parameters[name] for name, value in fitted.items()}
        if not self.config.upload:
            return Update(delta, 1, math.nan)
        gradients, loss = self.gradients({**parameters, **fitted}, data, examples, random)
        bound = self.bound(gradients, data.client)
        uploaded = self.uploaded(clipped_mean(gradients, bound), bound, data.client, random)
        reported = loss if self.config.mode == "paper" else math.nan
        return Update(delta | self.shaped(uploaded, self.shared(parameters)), 1, reported)

    def shared(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters that are not private."""
        left_out = set(private_names(self, parameters))
        return {name: value for name, value in parameters.items() if name not in left_out}

    def gradients(
        self,
        parameters: Mapping[str, Tensor],
        data: ClientData,
        examples: Examples,
        random: np.random.Generator,
    ) -> tuple[Tensor, float]:
        """Clipped gradients of the shared parameters, `float32 [J, l]` or `[1, l]`; mean loss."""
        shared = self.shared(parameters)
        (items, labels) = examples
        if not len(items):
            return torch.zeros(
                0, sum(value.numel() for value in shared.values()), device=self.device
            ), math.nan
        drawn = random.choice(len(items), size=min(self.config.examples, len(items)), replace=False)
        leaves = {
            name: value.detach().unsqueeze(0).requires_grad_() for name, value in shared.items()
        }
        fixed = {
            name: value.detach().unsqueeze(0)
            for name, value in parameters.items()
            if name not in shared
        }
        losses = self._losses({**fixed, **leaves}, data, (items[drawn], labels[drawn]))
        clipped = losses if self.config.clip == "examples" else losses.mean(0, keepdim=True)
        rows = []
        for direction in clipped:
            gradients = torch.autograd.grad(
                direction,
                list(leaves.values()),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
        return torch.stack(rows), float(losses.detach().mean())

    def _fitted(
        self,
        parameters: Mapping[str, Tensor],
        data: ClientData,
        examples: Examples,
        random: np.random.Generator,
    ) -> dict[str, Tensor]:
        """The private parameters after their epochs."""
        names = private_names(self, parameters)
        (items, labels) = examples
        if not names:
            return {}
        whole = {name: value.detach().unsqueeze(0) for name, value in parameters.items()}
        values = {name: whole[name].clone() for name in names}
        for _ in range(self.config.epochs):
            order = random.permutation(len(items))
            for start in range(0, len(items), _BATCH):
                batch = order[start : start + _BATCH]
                leaves = {name: value.requires_grad_() for name, value in values.items()}
                given = {**whole, **leaves}
                loss = self._losses(given, data, (items[batch], labels[batch])).mean()
                gradients = torch.autograd.grad(
                    loss, list(leaves.values()), allow_unused=True, materialize_grads=True
                )
                for value, gradient in zip(values.values(), gradients, strict=True):
                    value.detach_().sub_(gradient, alpha=self.config.private_rate)
        return {name: value.squeeze(0) for name, value in values.items()}

    def _losses(
        self, parameters: Mapping[str, Tensor], data: ClientData, examples: Examples
    ) -> Tensor:
        """The loss of each example, `[n]`, for parameters `[1, ...]`."""
        users = tuple(
            torch.from_numpy(codes).to(self.device).unsqueeze(0) for codes in data.features
        )
        items, labels = (torch.from_numpy(part).to(self.device) for part in examples)
        predicted = self.model.predict(parameters, users, items.unsqueeze(0))[0]
        return self.model.loss(predicted.unsqueeze(1), labels.unsqueeze(1))
