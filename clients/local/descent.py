# SPDX-License-Identifier: Apache-2.0
"""Gradient descent on one client's parameters, in place: the reference for training in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import StepConfig
from fedrec.cohort.sgd import SgdSettings


class DescentConfig(StepConfig):
    """Settings of steps with mini-batch gradient descent."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Learning rate (alpha1 in PrivRec)."""
    batch_size: int = Field(default=32, ge=1)
    """Examples per gradient step; the last batch of an epoch may be smaller."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Heavy-ball momentum; starts at zero in every round."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty added to the gradient."""
    proximal_mu: float = Field(default=0.0, ge=0)
    """Weight of FedProx's proximal term; a server may also send it as `proximal-mu`."""

    def sgd(self) -> SgdSettings:
        """The settings for training in blocks."""
        return SgdSettings(self.learning_rate, self.momentum, self.weight_decay, self.proximal_mu)


class LocalDescent:
    """One client's parameters while they are trained.

    Args:
        start: the parameters that are trained, without cohort dimension; unchanged.
        sgd: settings of the gradient steps.

    Attributes:
        values: `[1, ...]` each.
    """

    def __init__(self, start: Mapping[str, Tensor], sgd: SgdSettings) -> None:
        self.start = start
        self.sgd = sgd
        self.values = {name: value.detach().unsqueeze(0).clone() for name, value in start.items()}
        self._buffers = (
            {name: torch.zeros_like(v) for name, v in self.values.items()} if sgd.momentum else {}
        )

    def step(
        self, loss: Callable[[dict[str, Tensor]], Tensor], held: frozenset[str] = frozenset()
    ) -> Tensor:
        """One gradient step on `loss`, a function of the parameters `[1, ...]`; returns its value
        before the step.

        The parameters that are `held` stay unchanged, but their momentum is updated.
        """
        leaves = {name: value.requires_grad_() for name, value in self.values.items()}
        measured = loss(leaves).sum()
        gradients = torch.autograd.grad(
            measured, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        with torch.no_grad():
            for (name, value), gradient in zip(leaves.items(), gradients, strict=True):
                if self.sgd.weight_decay:
                    gradient = gradient + self.sgd.weight_decay * value
                if self.sgd.proximal_mu:
                    gradient = gradient + self.sgd.proximal_mu * (value - self.start[name])
                if self.sgd.momentum:
                    gradient = self._buffers[name].mul_(self.sgd.momentum).add_(gradient)
                value.detach_().sub_(gradient, alpha=0.0 if name in held else self.sgd.rate(name))
        return measured.detach()

    def delta(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The change of all `parameters`; zero for those that are not trained."""
        return {
            name: self.values[name].squeeze(0) - value
            if name in self.values
            else torch.zeros_like(value)
            for name, value in parameters.items()
        }


def in_batches(
    epochs: Iterable[tuple[np.ndarray, np.ndarray]],
    size: int,
    device: torch.device,
    step: Callable[[Tensor, Tensor], float],
) -> tuple[int, float]:
    """Take a step on each batch of each epoch, in order.

    Args:
        epochs: items `int64 [n]` and labels `float32 [n]` of each, n >= 1.
        size: examples of a batch; the last one of an epoch may be smaller.
        device: where the step is taken.
        step: trains on the items and labels of a batch, and gives the loss before.

    Returns:
        The number of examples and the mean loss of the last epoch; 0 and NaN without any.
    """
    examples = 0
    loss = math.nan
    for epoch in epochs:
        items, labels = (torch.from_numpy(array).to(device) for array in epoch)
        examples = len(items)
        loss = float(np.mean(list(map(step, items.split(size), labels.split(size)))))
    return examples, loss
