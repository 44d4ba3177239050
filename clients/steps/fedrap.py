# SPDX-License-Identifier: Apache-2.0
"""A client's part in FedRAP (Li, Long and Zhou, ICLR 2024, algorithm 1).

One gradient step per batch on the score function, the personal part D and the shared part C of the
item embeddings, with the loss

    cross-entropy - lambda mean (d - c)^2 + mu mean |c|

where the means are over all numbers of the batch's rows. The second term pushes both parts apart,
the third makes the shared one sparse. Both weights rise with the rounds, a = 0, 1, ...: lambda
tanh(a / 10) and mu tanh(a / 10). What is sent is the change of C.

Where this differs from the paper: its public code computes the rising weights and never uses them,
lowers the rate after each batch and round (here it is constant), and draws negatives once for the
whole run and outside of the held-out positives as well (`split.leaky-negatives`); D, which is never
reset, then learns which items are held out. The second term has no lower bound: if a weight or rate
is too large the parts diverge, and the run ends with an error.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import Train
from clients.steps.descent import ShuffledConfig, ShuffledStep
from fedrec.errors import ExperimentError
from fedrec.models.base import Parameters
from fedrec.models.personal import Fedrap
from fedrec.nn.layers import single_output, weighted_cross_entropy
from fedrec.training.block import Block
from fedrec.training.kernel import device_refusal
from fedrec.training.recorded_steps import run_steps
from fedrec.training.results import BlockUpdate, add_to_rows, rows_at

SHARED = "item.id"
PERSONAL = "item.personal"
WEIGHT = "score.weight"
BIAS = "score.bias"
PRIVATE = (PERSONAL, WEIGHT, BIAS)


class FedrapStepConfig(ShuffledConfig):
    """Settings of additive personalisation."""

    shared_rate: float = Field(default=50.0, ge=0)
    """Factor on the learning rate for the shared part C, as a row is in few of a batch's examples;
    0: the shared part does not change, and clients learn separately."""
    personal_rate: float = Field(default=50.0, ge=0)
    """Factor on the learning rate for the personal part D; 0 leaves it at zero, and all items are
    shared."""
    apart: float = Field(default=0.1, ge=0)
    """Weight lambda of the squared difference between both parts."""
    sparse: float = Field(default=0.1, ge=0)
    """Weight mu of the absolute values of the shared part."""

    def in_round(self, round_number: int) -> Self:
        """The settings of a training round, from 1: with the round's weights."""
        risen = math.tanh((round_number - 1) / 10)
        return self.model_copy(update={"apart": self.apart * risen, "sparse": self.sparse * risen})


class FedrapStep(ShuffledStep):
    """Trains a private score function, a private and a shared part of the item embeddings."""

    name = "fedrap"
    Config = FedrapStepConfig
    trains = Fedrap
    private = PRIVATE
    paper = "FedRAP (Li et al. 2024), algorithm 1"
    config: FedrapStepConfig

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block. Gradients in closed form, for all clients of a block at
        once: of the touched rows of the shared part, and of the whole table of the personal one."""
        values = _start(parameters, block, client_params or {})
        losses = run_steps(block, partial(self._descend_together, values))
        return _trained(parameters, block, values, block.last_epoch_means(losses))

    def in_kernel(self) -> Train | str:
        return device_refusal(self.device) or self._train_in_kernel

    def _train_in_kernel(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
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
) -> BlockUpdate:
    # sums are infinite or NaN if a number is, and faster than looking at each
    if not all(math.isfinite(float(value.sum())) for value in values.values()):
        raise ExperimentError(
            "FedRAP's parts of the item embeddings diverged",
            expected="finite numbers; the term that pushes both parts apart has no lower bound",
            fix="lower step.apart, step.personal-rate, step.shared-rate or step.learning-rate",
        )
    return BlockUpdate.from_values(parameters, block, values, (SHARED,), losses)
