# SPDX-License-Identifier: Apache-2.0
"""Dual personalisation on the device (Zhang et al. 2023, algorithm 1): the score function first,
then the items.

The score function is private: it stays on the device between rounds and is never sent. In each
batch it takes a gradient step with the item embeddings held, then the item embeddings take one
under the new score function.

Where this differs from the paper's public code: negatives are drawn outside the *training*
positives only. There, they are drawn outside the held-out positives as well, so the one item that a
client never moves against is its test item, and a score made of nothing but which rows its updates
touched finds it every time. Item embeddings have a rate of their own here too, but as a plain
factor and not as rate times the number of items times another factor. Only the rows that the client
touches are trained, which is the same thing at a cost that does not grow with the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from clients.step import Step, StepConfig
from clients.steps.descent import Update, one_by_one
from fedrec.data.client_data import ClientData, draw_negatives
from fedrec.models.base import Model
from fedrec.training.block import Block
from fedrec.training.results import BlockUpdate
from pfedrec.model import LinearScore

WEIGHT = "score.weight"
BIAS = "score.bias"
ITEMS = "item.id"


class DualPersonalConfig(StepConfig):
    """Settings of dual personalisation."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Step size of the score function."""
    item_rate: float = Field(default=50.0, gt=0)
    """Factor on it for the item embeddings; a row is in few of a batch's examples, and the loss is
    their mean."""
    batch_size: int = Field(default=256, ge=1)
    """Examples per gradient step."""
    negatives: int = Field(default=4, ge=1)
    """Unobserved items per positive (paper's code: 4)."""


class DualPersonal(Step):
    """Trains a private score function and the shared item embeddings in turn.

    Raises:
        ExperimentError: the model is another one.
    """

    Config = DualPersonalConfig
    paper = "PFedRec (Zhang et al. 2023), algorithm 1"
    private = (WEIGHT, BIAS)
    config: DualPersonalConfig

    def __init__(self, config: DualPersonalConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        if not isinstance(model, LinearScore):
            from fedrec.errors import ExperimentError

            raise ExperimentError(
                "dual personalisation trains a linear score function",
                expected="model.name = 'linear-score'",
                got=type(model).__name__,
                fix="set model.name = 'linear-score'",
            )

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        client_params: Mapping[str, Tensor] | None = None,
    ) -> BlockUpdate:
        """Train a block of clients one after the other; the private part of an update is what the
        device adds to its own state."""
        return one_by_one(parameters, block, client_params, self._train)

    def _train(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        score = {name: parameters[name].clone() for name in (WEIGHT, BIAS)}
        delta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        items, labels = self._examples(data, random)
        if not len(items):
            return Update(delta)
        touched, places = np.unique(items, return_inverse=True)
        rows = torch.from_numpy(touched).to(self.device)
        start = parameters[ITEMS][rows]
        table = start.clone()
        loss = float("nan")
        for _ in range(self.config.epochs):
            order = random.permutation(len(items))
            losses = []
            for begin in range(0, len(order), self.config.batch_size):
                batch = order[begin : begin + self.config.batch_size]
                where = torch.from_numpy(places[batch]).to(self.device)
                losses.append(
                    self._turn(score, table, where, torch.from_numpy(labels[batch]).to(self.device))
                )
            loss = float(np.mean(losses))
        for name, value in score.items():
            delta[name] = value - parameters[name]
        delta[ITEMS][rows] = table - start
        return Update(delta, len(items), loss)

    def _turn(
        self, score: dict[str, Tensor], table: Tensor, where: Tensor, labels: Tensor
    ) -> float:
        """A gradient step of the score function, then one of the items; the gradients are those of
        the mean loss."""
        own = table[where]
        predicted = own @ score[WEIGHT] + score[BIAS]
        loss = float(F.binary_cross_entropy_with_logits(predicted, labels))
        error = (torch.sigmoid(predicted) - labels) / len(labels)
        score[WEIGHT] = score[WEIGHT] - self.config.learning_rate * (own.T @ error)
        score[BIAS] = score[BIAS] - self.config.learning_rate * error.sum()
        error = (torch.sigmoid(own @ score[WEIGHT] + score[BIAS]) - labels) / len(labels)
        step = self.config.learning_rate * self.config.item_rate
        table.index_add_(0, where, -step * error[:, None] * score[WEIGHT][None, :])
        return loss

    def _examples(
        self, data: ClientData, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Items and labels of a round: the positives and unobserved items outside the *training*
        positives."""
        count = self.config.negatives * len(data.positives)
        drawn = (
            draw_negatives(data.positives, self.model.schema.num_items, count, random)
            if count
            else data.positives
        )
        labels = np.concatenate([np.ones(len(data.positives)), np.zeros(len(drawn))]).astype(
            np.float32
        )
        return np.concatenate([data.positives, drawn]), labels
