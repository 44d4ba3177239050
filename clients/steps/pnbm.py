# SPDX-License-Identifier: Apache-2.0
"""A client's part in the neighbourhood model: gradient steps on the similarities between the items
that it rated.

The loss of a user's ratings is a function of its own block of S alone, n x n for n rated items, so
that is what the client changes: the rows and columns of S (or the rows of A and B) of its items,
and nothing else. Under differential privacy the whole block is clipped in L2 and the sum gets noise
on all of S, as any update does. That a user's examples are in different rows of S does not reduce
the sensitivity, because one rating is a neighbour in all of them.

Where this differs from the paper: the paper trains centrally, on batches of ratings of all users,
and adds noise to each entry.
"""

import math
from collections.abc import Mapping

import numpy as np
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig
from fedrec.models.base import Parameters
from fedrec.models.linear import Pnbm
from fedrec.neighbourhood import Rest, own_gradient
from fedrec.training.block import Block
from fedrec.training.draws import ExampleDraw, PreferenceDraw
from fedrec.training.results import BlockChange, BlockUpdate, ChangedRows


class PnbmStepConfig(StepConfig):
    """Settings of a client's part in the neighbourhood model."""

    epochs: int = Field(default=1, ge=0)
    """Gradient steps, each on all of the client's ratings; 0 changes nothing."""
    learning_rate: float = Field(default=1.0, gt=0)
    """Step size, on half the sum of squared errors."""


class PnbmStep(Step):
    """Gradient steps on one user's block of the similarities."""

    name = "pnbm"
    Config = PnbmStepConfig
    trains = Pnbm
    model: Pnbm
    paper = "PNBM, equations 4-5"
    config: PnbmStepConfig

    def draw(self) -> ExampleDraw:
        """All ratings of a client; nothing is drawn."""
        return PreferenceDraw(min(self.config.epochs, 1))

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        config = self.config
        shared = _Shared(self.model, parameters)
        losses = []
        clients = []
        for index, steps in enumerate(block.steps):
            count = int(block.sizes[0, index]) if steps else 0
            items, ratings = (
                part[0, index, :count].numpy(force=True) if count else np.empty(0, np.int64)
                for part in (block.items, block.labels)
            )
            ratings = ratings.astype(np.float64)
            trained, loss = shared.trained(items, ratings, config.epochs, config.learning_rate)
            clients.append(trained)
            losses.append(loss)
        changes: dict[str, BlockChange] = {}
        for name in shared.names:
            parts = [trained[name] for trained in clients if name in trained]
            counts = [len(trained[name][0]) if name in trained else 0 for trained in clients]
            if parts:
                rows, values = (np.concatenate(part) for part in zip(*parts, strict=True))
                changes[name] = ChangedRows.ragged(np.cumsum([0, *counts]), rows, values)
        return BlockUpdate(parameters, block, changes, losses)


class _Shared:
    """The global parameters as a client sees them, in float64."""

    def __init__(self, model: Pnbm, parameters: Mapping[str, Tensor]) -> None:
        self._config = model.config
        self._means = parameters["item.mean"][:, 0].double().numpy(force=True)
        self._slots = np.full(len(self._means), -1)
        chosen = model.chosen(parameters["item.count"]).numpy(force=True)
        self._slots[chosen] = np.arange(model.size)
        square = self._config.rank is None
        self.names = ("similarity",) if square else ("similarity.left", "similarity.right")
        self._learned = {name: parameters[name].numpy(force=True) for name in self.names}

    def trained(
        self, items: np.ndarray, ratings: np.ndarray, epochs: int, rate: float
    ) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], float]:
        """A client's changes after some steps, and its mean squared error before the last one.

        The changes are rows of the parameter viewed as a table, and their values: single numbers
        of the similarities between its items, or its items' rows of both factors.
        """
        slots = self._slots[items]
        inside = slots >= 0
        rows = slots[inside]
        if not len(rows) or not epochs:
            return {}, math.nan
        deviations = ratings - self._means[items]
        means = self._means[items[inside]]
        low, high = (bound - means for bound in self._config.scale)
        weight = float((~inside).sum())
        total = deviations[~inside].sum()
        rest = Rest(self._config.prior, weight, total, low, high)
        cells = rows
        if self._config.rank is None:
            cells = (rows[:, None] * len(self._learned["similarity"]) + rows).ravel()
        before = {
            name: (table.ravel()[cells] if self._config.rank is None else table[rows])
            for name, table in self._learned.items()
        }
        before = {
            name: value.astype(np.float64).reshape(len(rows), -1) for name, value in before.items()
        }
        learned = before
        changes: dict[str, np.ndarray] = {}
        errors = np.zeros(1)
        for epoch in range(epochs):
            moves, errors = self._moves(learned, deviations[inside], rest, rate)
            changes = {n: changes[n] + move if epoch else move for n, move in moves.items()}
            if epoch + 1 < epochs:
                learned = {n: value + changes[n] for n, value in before.items()}
        width = 1 if self._config.rank is None else self._config.rank
        parts = {name: (cells, value.reshape(-1, width)) for name, value in changes.items()}
        return parts, float(np.square(errors).mean())

    def _moves(
        self, learned: Mapping[str, np.ndarray], deviations: np.ndarray, rest: Rest, rate: float
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The changes of one step, and the errors before it."""
        if self._config.rank is None:
            gradient, errors = own_gradient(learned["similarity"], deviations, rest)
            gradient *= -rate
            return {"similarity": gradient}, errors
        left = learned["similarity.left"]
        right = learned["similarity.right"]
        gradient, errors = own_gradient(1 + left @ right.T, deviations, rest)
        to_left = -rate * (gradient @ right)
        to_right = -rate * (gradient.T @ left)
        return {"similarity.left": to_left, "similarity.right": to_right}, errors
