# SPDX-License-Identifier: Apache-2.0
"""Local gradient steps on all of a client's positives at once, each with fresh unobserved items as
negatives."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig, Update
from fedrec.data.client_data import ClientData
from fedrec.data.negatives import draw_negatives


class ExampleConfig(StepConfig):
    """Settings; `epochs` comes from `StepConfig`, and 0 must change nothing."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Step size."""
    negatives: int = Field(default=2, ge=1)
    """Unobserved items per positive."""


class Example(Step):
    """Full-batch gradient descent on one client's data."""

    Config = ExampleConfig
    config: ExampleConfig

    def update(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        """The client's update, `theta_local - theta_global`. All random numbers come from
        `random`."""
        # one client: C = 1
        values = {name: value.clone().unsqueeze(0) for name, value in parameters.items()}
        users = tuple(
            torch.from_numpy(codes).to(self.device).unsqueeze(0) for codes in data.features
        )
        loss = float("nan")
        count = len(data.positives)
        for _ in range(self.config.epochs if count else 0):
            drawn = draw_negatives(
                data.positives, self.model.schema.num_items, self.config.negatives * count, random
            )
            items = (
                torch.from_numpy(np.concatenate([data.positives, drawn]))
                .to(self.device)
                .unsqueeze(0)
            )
            labels = torch.zeros(1, items.shape[1], device=self.device)
            labels[:, :count] = 1.0
            leaves = {name: value.requires_grad_() for name, value in values.items()}
            measured = self.model.loss(self.model.predict(leaves, users, items), labels).sum()
            gradients = torch.autograd.grad(
                measured, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
            steps = zip(leaves.items(), gradients, strict=True)
            values = {
                name: (value - self.config.learning_rate * step).detach()
                for (name, value), step in steps
            }
            loss = float(measured.detach())
        delta = {
            name: values[name].detach().squeeze(0) - value for name, value in parameters.items()
        }
        return Update(delta, examples=count * (1 + self.config.negatives), loss=loss)
