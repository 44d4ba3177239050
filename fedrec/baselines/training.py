# SPDX-License-Identifier: Apache-2.0
"""Training in one place: gradient descent over epochs of batches, moving averages, early
stopping."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.device import one_thread
from fedrec.nn.optimisers import SGD, Adam

HELD_OUT = 0.1
"""Share of the training data that early stopping holds out."""


class TrainingConfig(Config):
    """Settings of all systems that are trained by gradient descent on batches."""

    epochs: int = Field(default=10, ge=1)
    """Epochs over the training data."""
    batch_size: int = Field(default=1024, ge=1)
    """Examples per gradient step."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """Adam, or plain gradient descent."""
    learning_rate: float = Field(default=0.001, gt=0)
    """Learning rate of the optimiser."""
    final_rate: float = Field(default=1.0, gt=0, le=1)
    """Learning rate at the end, as a share of `learning_rate`; it falls linearly. 1: constant."""
    average: float = Field(default=0.0, ge=0, lt=1)
    """Decay of the exponential moving average of all parameters, which is used after training: it
    averages about 1 / (1 - average) steps; 0: the last parameters are used."""


class PatienceConfig(TrainingConfig):
    """The same for systems that can hold out a part of their training data."""

    patience: int | None = Field(default=None, ge=1)
    """Training stops after this number of epochs in a row without a smaller loss on a tenth of the
    training data, which is held out, and the parameters of the smallest loss are used. Default: all
    epochs, on all data."""


def train(
    tensors: Sequence[Tensor],
    config: TrainingConfig,
    epoch: Callable[[int], Iterable[Any]],
    backward: Callable[[Any], object],
    *,
    steps: int,
    fused: bool = True,
    patience: int | None = None,
    held_out: Callable[[Sequence[Tensor]], float] | None = None,
    long_steps: bool = False,
) -> list[Tensor]:
    """Train leaf tensors, on a processor with one thread unless steps are long.

    Args:
        tensors: `float32 [...]` of any shapes, trained in place; with an average or early stopping
            they are not the result.
        config: epochs, optimiser, average.
        epoch: the batches of an epoch, by its number from 0.
        backward: computes the gradients of a batch.
        steps: number of steps of an epoch, over which the learning rate falls.
        fused: whether Adam updates all parameters of a tensor in one pass, which is faster and
            rounds differently.
        patience: training stops after so many epochs in a row without a smaller loss on the
            held-out examples, and the parameters of the smallest loss are used; None: never.
        held_out: loss of values of the tensors on the held-out examples; needed for `patience`.
        long_steps: whether a step takes tenths of a second, for which several threads are worth
            their waiting for each other.

    Returns:
        The trained values `float32 [...]`, detached, in the order of the tensors.
    """
    optimiser = _optimiser(tensors, config, fused)
    falling = torch.optim.lr_scheduler.LinearLR(
        optimiser, 1.0, config.final_rate, max(1, steps * config.epochs - 1)
    )
    mean = MovingAverage(tensors, config.average)
    best = BestValues(patience)
    with nullcontext() if long_steps else one_thread():
        for number in range(config.epochs):
            for batch in epoch(number):
                optimiser.zero_grad()
                backward(batch)
                optimiser.step()
                falling.step()
                mean.add(tensors)
            values = mean.values or tensors
            if held_out is not None and best.reached(held_out(values), values):
                break
    return [value.detach() for value in best.values or mean.values or tensors]


def _optimiser(
    tensors: Sequence[Tensor], config: TrainingConfig, fused: bool
) -> torch.optim.Optimizer:
    if config.optimiser == "sgd":
        return SGD(tensors, lr=config.learning_rate)
    return Adam(tensors, lr=config.learning_rate, fused=fused)


class MovingAverage:
    """Exponential moving average of tensors over steps (Polyak and Juditsky 1992 for the plain
    mean). It ranks better than the last parameters, which still change with every batch. The decay
    rises to its value over the first steps, so that the initial values have no weight.

    Args:
        tensors: initial values, of any shapes.
        decay: in [0, 1); 0 keeps nothing.

    Attributes:
        values: the averages, in the order of the tensors; empty with a decay of 0.
    """

    def __init__(self, tensors: Sequence[Tensor], decay: float) -> None:
        self.values = [value.detach().clone() for value in tensors] if decay else []
        self._decay = decay
        self._steps = 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Update the averages with the tensors `[...]` after a step, in the order and shapes of
        `values`."""
        self._steps += 1
        weight = 1 - min(self._decay, (1 + self._steps) / (10 + self._steps))
        for mean, value in zip(self.values, tensors, strict=False):  # none with a decay of 0
            mean.lerp_(value.detach(), weight)


class BestValues:
    """The values with the smallest loss so far.

    Args:
        patience: number of losses in a row without a smaller one after which to stop; None: never.

    Attributes:
        values: copies of the tensors with the smallest loss; empty without patience.
    """

    def __init__(self, patience: int | None) -> None:
        self.values: list[Tensor] = []
        self._patience = patience
        self._smallest = math.inf
        self._since = 0

    def reached(self, loss: float, tensors: Sequence[Tensor]) -> bool:
        """Whether to stop after a loss, of tensors `[...]`."""
        if self._patience is None:
            return False
        self._since += 1
        if loss < self._smallest:
            self._smallest = loss
            self._since = 0
            self.values = [value.detach().clone() for value in tensors]
        return self._since >= self._patience
