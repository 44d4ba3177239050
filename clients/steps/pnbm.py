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

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig
from clients.steps.updates import ChangedPart, Parts, Updates
from fedrec.models.base import Parameters
from fedrec.models.pnbm import Pnbm
from fedrec.neighbourhood.learned import Rest, own_gradient
from fedrec.training.block import Block
from fedrec.training.draws import ExampleDraw, PreferenceDraw


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
    ) -> Updates:
        shared = _Shared(self.model, parameters)
        changes = []
        losses = []
        for index, steps in enumerate(block.steps):
            count = int(block.sizes[0, index]) if steps else 0
            items, ratings = (
                part[0, index, :count].numpy(force=True) if count else np.empty(0, np.int64)
                for part in (block.items, block.labels)
            )
            parts, loss = self._trained(shared, items, ratings)
            changes.append(parts)
            losses.append(loss)
        names = dict.fromkeys(name for parts in changes for name in parts)
        by_name = {name: Parts([parts.get(name) for parts in changes]) for name in names}
        return Updates(parameters, block, by_name, losses)

    def _trained(
        self, shared: _Shared, items: np.ndarray, ratings: np.ndarray
    ) -> tuple[dict[str, ChangedPart], float]:
        """A client's changes, and its mean squared error before the last step."""
        if not self.config.epochs or not len(items):
            return {}, math.nan
        return shared.trained(
            items, ratings.astype(np.float64), self.config.epochs, self.config.learning_rate
        )


class _Shared:
    """The global parameters as a client sees them, in float64."""

    def __init__(self, model: Pnbm, parameters: Mapping[str, Tensor]) -> None:
        self._config = model.config
        self._means = parameters["item.mean"][:, 0].double().numpy(force=True)
        self._slots = np.full(len(self._means), -1)
        self._slots[model.chosen(parameters["item.count"]).numpy(force=True)] = np.arange(
            model.size
        )
        names = (
            ("similarity",)
            if self._config.rank is None
            else ("similarity.left", "similarity.right")
        )
        self._learned = {name: parameters[name].numpy(force=True) for name in names}

    def trained(
        self, items: np.ndarray, ratings: np.ndarray, epochs: int, rate: float
    ) -> tuple[dict[str, ChangedPart], float]:
        """The change of a client's parts after some steps, and its mean squared error before the
        last one."""
        slots = self._slots[items]
        inside = slots >= 0
        deviations = ratings - self._means[items]
        if not inside.any():
            return {}, math.nan
        rows = slots[inside]
        means = self._means[items[inside]]
        start = self._config.start
        low, high = (bound - means for bound in self._config.scale)
        weight = start * (~inside).sum()
        total = start * deviations[~inside].sum()
        rest = Rest(self._config.prior, weight, total, low, high)
        if self._config.rank is None:
            before = {
                "similarity": self._learned["similarity"][rows[:, None], rows].astype(np.float64)
            }
        else:
            before = {name: table[rows].astype(np.float64) for name, table in self._learned.items()}
        after = {name: value.copy() for name, value in before.items()}
        errors = np.zeros(1)
        for _ in range(epochs):
            errors = self._descend(after, deviations[inside], rest, rate)
        placed = torch.from_numpy(rows)
        columns = placed if self._config.rank is None else None
        parts = {
            name: ChangedPart(placed, columns, torch.from_numpy(value - before[name]))
            for name, value in after.items()
        }
        return parts, float(np.square(errors).mean())

    def _descend(
        self, learned: dict[str, np.ndarray], deviations: np.ndarray, rest: Rest, rate: float
    ) -> np.ndarray:
        """One step, in place; gives the errors before it."""
        if self._config.rank is None:
            gradient, errors = own_gradient(learned["similarity"], deviations, rest)
            learned["similarity"] -= rate * gradient
            return errors
        left = learned["similarity.left"]
        right = learned["similarity.right"]
        gradient, errors = own_gradient(self._config.start + left @ right.T, deviations, rest)
        to_left = gradient @ right
        to_right = gradient.T @ left
        left -= rate * to_left
        right -= rate * to_right
        return errors
