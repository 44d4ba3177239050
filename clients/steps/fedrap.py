# SPDX-License-Identifier: Apache-2.0
"""A client's part in FedRAP (Li, Long and Zhou, ICLR 2024, algorithm 1).

One gradient step per batch on the score function, the personal part D and the shared part C of the
item embeddings, with the loss

    cross-entropy - lambda mean (d - c)^2 + mu mean |c|

where the means are over all numbers of the batch's rows. The second term pushes both parts apart,
the third makes the shared one sparse. Both weights rise with the rounds, a = 0, 1, ...: lambda
tanh(a / 10) and mu tanh(a / 10) (`schedule = "tanh"`). What is sent is the change of C.

Where this differs from the paper: its public code computes the rising weights and never uses them
(`schedule = "constant"` is what it does), lowers the rate after each batch as well as after each
round (here `decay` after each round alone), and draws negatives once for the whole run and outside
of the held-out positives as well (`split.leaky-negatives`); D, which is never reset, then learns
which items are held out. The second term has no lower bound: if a weight or rate is too large the
parts diverge, and the run ends with an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.steps.descent import ShuffledConfig, ShuffledStep
from fedrec.errors import ExperimentError
from fedrec.models.base import Parameters
from fedrec.models.personal import Fedrap
from fedrec.nn.layers import single_output, weighted_cross_entropy
from fedrec.training.block import Block
from fedrec.training.kernel import device_refusal
from fedrec.training.recorded_steps import run_steps
from fedrec.training.results import Trained, add_to_rows, rows_at

SHARED = "item.id"
PERSONAL = "item.personal"
WEIGHT = "score.weight"
BIAS = "score.bias"
PRIVATE = (PERSONAL, WEIGHT, BIAS)


class FedrapStepConfig(ShuffledConfig):
    """Settings of additive personalisation."""

    epochs: int = Field(default=1, ge=0)
    """Passes over the examples (paper's code: up to 10, until the loss no longer changes); 0 trains
    nothing."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Step size of the score function."""
    shared_rate: float = Field(default=50.0, ge=0)
    """Factor on it for the shared part C, as a row is in few of a batch's examples; 0: the shared
    part does not change, and clients learn separately."""
    personal_rate: float = Field(default=50.0, ge=0)
    """Factor on it for the personal part D; 0 leaves it at zero, and all items are shared."""
    apart: float = Field(default=0.1, ge=0)
    """Weight lambda of the squared difference between both parts."""
    sparse: float = Field(default=0.1, ge=0)
    """Weight mu of the absolute values of the shared part."""
    schedule: Literal["tanh", "constant"] = "tanh"
    """Whether both weights rise with the rounds (paper), or are constant (paper's code)."""
    decay: float = Field(default=1.0, gt=0, le=1)
    """Factor on the step size after each round (paper's code: 0.97)."""
    batch_size: int = Field(default=256, ge=1)
    """Examples per gradient step (paper's code: 2048)."""
    negatives: int = Field(default=4, ge=1)
    """Unobserved items per positive (paper's code: 4)."""


class FedrapStep(ShuffledStep):
    """Trains a private score function, a private and a shared part of the item embeddings."""

    name = "fedrap"
    Config = FedrapStepConfig
    trains = Fedrap
    tasks = ("ranking",)
    private = PRIVATE
    kernels = ("train_additive",)
    paper = "FedRAP (Li et al. 2024), algorithm 1"
    config: FedrapStepConfig

    def in_round(self, round_number: int) -> FedrapStep:
        """The step as it is in a training round, from 1: with the round's weights and rate."""
        config = self.config
        past = round_number - 1
        risen = math.tanh(past / 10) if config.schedule == "tanh" else 1.0
        changes = {
            "apart": config.apart * risen,
            "sparse": config.sparse * risen,
            "learning_rate": config.learning_rate * config.decay**past,
        }
        return type(self)(config.model_copy(update=changes), self.model, self.device)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> Trained:
        """Train every client of a block. Gradients in closed form, for all clients of a block at
        once: of the touched rows of the shared part, and of the whole table of the personal one."""
        values = _start(parameters, block, client_params or {})
        losses = run_steps(block, partial(self._descend_together, values))
        return _trained(parameters, block, values, block.last_epoch_means(losses))

    def kernel_refusal(self) -> str | None:
        return device_refusal(self.device)

    def train_in_kernel(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> Trained:
        from fedrec.training.steps import (
            train_additive,  # imports Numba, which the other paths do not need
        )

        values = _start(parameters, block, client_params or {})
        arrays = {name: value.numpy() for name, value in values.items()}
        losses = np.full(len(block), np.nan)
        rates = self._rates()
        train_additive(
            (block.items.numpy(), block.rows.numpy(), block.labels.numpy(), block.sizes.numpy()),
            np.array(block.steps, dtype=np.int64),
            np.array(block.last_epoch, dtype=np.int64),
            (arrays[WEIGHT][:, :, 0], arrays[BIAS][:, 0]),
            arrays[SHARED],
            arrays[PERSONAL],
            np.array([rates[name] for name in (WEIGHT, SHARED, PERSONAL)], dtype=np.float32),
            np.array([self.config.apart, self.config.sparse], dtype=np.float32),
            losses,
        )
        return _trained(parameters, block, values, losses)

    def _rates(self) -> dict[str, float]:
        rate = self.config.learning_rate
        return {
            WEIGHT: rate,
            BIAS: rate,
            SHARED: rate * self.config.shared_rate,
            PERSONAL: rate * self.config.personal_rate,
        }

    def _descend_together(
        self, values: dict[str, Tensor], block: Block, step: int, active: int
    ) -> Tensor:
        """Train the first `active` clients; their cross-entropies `[active]`."""
        config = self.config
        rates = self._rates()
        width = values[SHARED].shape[-1]
        flat = {name: values[name].view(-1, width) for name in (SHARED, PERSONAL)}
        first = torch.arange(active, device=block.items.device)[:, None] * values[PERSONAL].shape[1]
        rows = {
            SHARED: block.rows[step, :active].flatten(),
            PERSONAL: (block.items[step, :active] + first).flatten(),
        }
        shared, personal = (
            flat[name].index_select(0, rows[name]).view(active, -1, width)
            for name in (SHARED, PERSONAL)
        )
        labels = block.labels[step, :active]
        weights = block.weights[step, :active]
        weight = values[WEIGHT][:active]
        added = shared + personal
        predicted = single_output(added, weight) + values[BIAS][:active]
        losses = weighted_cross_entropy(predicted, labels, weights)
        error = (torch.sigmoid(predicted) - labels) * weights
        fitted = error.unsqueeze(-1) * weight.transpose(1, 2)
        share = weights.unsqueeze(-1) / width
        parted = 2 * config.apart * share * (personal - shared)
        moves = {
            SHARED: fitted + parted + config.sparse * share * shared.sign(),
            PERSONAL: fitted - parted,
        }
        weight.sub_(torch.bmm(error.unsqueeze(1), added).mT, alpha=rates[WEIGHT])
        values[BIAS][:active].sub_(error.sum(1, keepdim=True), alpha=rates[BIAS])
        for name, move in moves.items():
            if rates[name]:
                add_to_rows(flat[name], rows[name], move.flatten(0, 1), -rates[name])
        return losses


def _start(parameters: Parameters, block: Block, client_params: Parameters) -> dict[str, Tensor]:
    """The trained values of the clients, `[C, ...]` each: of the shared part the touched rows."""
    values = {
        name: client_params.get(
            name, parameters[name].expand(len(block), *parameters[name].shape)
        ).clone(memory_format=torch.contiguous_format)
        for name in PRIVATE
    }
    return values | {SHARED: rows_at(parameters[SHARED], block.touched)}


def _trained(
    parameters: Parameters, block: Block, values: dict[str, Tensor], losses: Tensor | np.ndarray
) -> Trained:
    _check_finite(values, None)
    return Trained(parameters, block, values, (SHARED,), torch.ones(len(block)), losses)


def _check_finite(values: Mapping[str, Tensor], client: int | None) -> None:
    # sums are infinite or NaN if a number is, and faster than looking at each
    if all(math.isfinite(float(value.sum())) for value in values.values()):
        return
    raise ExperimentError(
        "FedRAP's parts of the item embeddings diverged"
        + ("" if client is None else f" (client {client})"),
        expected="finite numbers; the term that pushes both parts apart has no lower bound",
        fix="lower step.apart, step.personal-rate, step.shared-rate or step.learning-rate",
    )
