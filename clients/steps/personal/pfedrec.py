# SPDX-License-Identifier: Apache-2.0
"""Dual personalisation on the device (PFedRec, Zhang et al. 2023, algorithm 1): first the score
function, then items.

In each batch the private score function takes a gradient step with the item embeddings held; then
the embeddings take one under the new score function. What is sent is the change of the embeddings.

Where this differs from the paper's public code: negatives are drawn outside the training positives
only (there, outside the held-out ones as well: `split.leaky-negatives`). Item embeddings have a
rate of their own here too, but as a plain factor (`item-rate`) and not as a rate times the number
of items times another factor, which undoes the server's mean over many clients of whom few touch a
row: here the strategy corrects for that, by its server rate or by `fed-adam`.
"""

from __future__ import annotations

from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from clients.local.shuffled import ShuffledConfig, ShuffledStep
from fedrec.cohort.block import Block
from fedrec.cohort.recorded_steps import run_steps
from fedrec.cohort.results import Trained
from fedrec.models.base import Parameters
from fedrec.models.pfedrec import Pfedrec
from fedrec.nn.layers import single_output, weighted_cross_entropy
from fedrec.nn.table_rows import add_to_rows, rows_at

WEIGHT = "score.weight"
BIAS = "score.bias"
ITEMS = "item.id"


class PfedrecStepConfig(ShuffledConfig):
    """Settings of dual personalisation."""

    epochs: int = Field(default=1, ge=0)
    """Passes over the examples (paper's code: 1); 0 trains nothing."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Step size of the score function."""
    item_rate: float = Field(default=50.0, ge=0)
    """Factor on it for the item embeddings, as a row is in few of a batch's examples and the loss
    is their mean."""
    batch_size: int = Field(default=256, ge=1)
    """Examples per gradient step (paper's code: 256)."""
    negatives: int = Field(default=4, ge=1)
    """Unobserved items per positive (paper's code: 4)."""


class PfedrecStep(ShuffledStep):
    """Trains a private score function and the shared item embeddings in turns."""

    name = "pfedrec"
    Config = PfedrecStepConfig
    trains = Pfedrec
    tasks = ("ranking",)
    private = (WEIGHT, BIAS)
    paper = "PFedRec (Zhang et al. 2023), algorithm 1"
    config: PfedrecStepConfig

    def train_block(
        self, parameters: Parameters, block: Block, own: Parameters | None = None
    ) -> Trained:
        """Train all clients of a block at once, with gradients in closed form."""
        score = {
            name: (own or {})
            .get(name, parameters[name].expand(len(block), *parameters[name].shape))
            .clone()
            for name in (WEIGHT, BIAS)
        }
        table = rows_at(parameters[ITEMS], block.touched)
        losses = run_steps(block, partial(self._turns_together, score, table))
        untouched = torch.ones(len(block))
        values = {**score, ITEMS: table}
        return Trained(
            parameters, block, values, (ITEMS,), untouched, block.last_epoch_means(losses)
        )

    def _turns_together(
        self, score: dict[str, Tensor], table: Tensor, block: Block, step: int, active: int
    ) -> Tensor:
        """The same of the first `active` clients; their losses `[active]`."""
        flat = table.view(-1, table.shape[-1])
        rate = self.config.learning_rate
        places = block.places[step, :active].flatten()
        rows = flat.index_select(0, places).view(active, -1, table.shape[-1])
        labels = block.labels[step, :active]
        weights = block.weights[step, :active]
        weight = score[WEIGHT][:active]
        bias = score[BIAS][:active]
        predicted = single_output(rows, weight) + bias
        losses = weighted_cross_entropy(predicted, labels, weights)
        error = (torch.sigmoid(predicted) - labels) * weights
        weight.sub_(torch.bmm(error.unsqueeze(1), rows).mT, alpha=rate)
        bias.sub_(error.sum(1, keepdim=True), alpha=rate)
        predicted = single_output(rows, weight) + bias
        error = (torch.sigmoid(predicted) - labels) * weights
        moved = (error.unsqueeze(-1) * weight.transpose(1, 2)).flatten(0, 1)
        add_to_rows(flat, places, moved, -rate * self.config.item_rate)
        return losses
