# SPDX-License-Identifier: Apache-2.0
"""A client's part in meta matrix factorization (Lin et al. 2020): predict, and return gradients.

The device gets the parameters that the server generated for it, predicts its own ratings, and
replies with the gradient of its mean loss with respect to these parameters. It does not train them:
in the next round it gets new ones.

Where this differs from the paper: all examples of a client are one batch. For ranking, unobserved
items are drawn as negatives outside the training positives, new ones in each round.
"""

import torch
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig
from clients.steps.descent import unchanged
from fedrec.models.base import Parameters
from fedrec.training.block import Block
from fedrec.training.draws import ExampleDraw
from fedrec.training.results import BlockUpdate

_NEGATIVES = 4  # unobserved items per positive (ranking), drawn outside the training positives
_WIDTH = 64  # examples side by side; clients of a block are padded to multiples of it


class MetaMfStepConfig(StepConfig):
    """Settings of a client's part in meta matrix factorization."""

    epochs: int = Field(default=1, ge=0, le=1)
    """1 in training; 0: no gradient, to evaluate the generated parameters."""


class MetaMfStep(Step):
    """Gradients with respect to generated parameters."""

    name = "metamf"
    Config = MetaMfStepConfig
    generated = True
    paper = "MetaMF (Lin et al. 2020)"
    config: MetaMfStepConfig

    def draw(self) -> ExampleDraw:
        """One client's examples; they name the rows that it needs."""
        return ExampleDraw(self.config.epochs, _WIDTH, _NEGATIVES, shuffled=False)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Minus the gradient of every client's mean loss at its generated parameters."""
        counts = torch.tensor(block.examples, device=self.device)
        given = client_params or {}
        tables = tuple(name for name in self.model.item_tables if name in given)
        if not block.active:
            return unchanged(parameters, block, given, tables)
        rows = _side_by_side(block.places)
        real = _side_by_side(block.weights) > 0
        leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
        predicted = self.model.predict(leaves, (), _side_by_side(block.items), rows=rows)
        losses = self.model.loss(
            predicted, _side_by_side(block.labels), real / counts.clamp(min=1)[:, None]
        )
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        changes = {name: -gradient for name, gradient in zip(leaves, gradients, strict=True)}
        reported = torch.where(counts > 0, losses.detach(), torch.nan)
        return BlockUpdate.from_changes(parameters, block, changes, tables, reported, given)


def _side_by_side(steps: Tensor) -> Tensor:
    """All batches of each client in one row: `[S, C, B]` gives `[C, S * B]`."""
    return steps.transpose(0, 1).flatten(1)
