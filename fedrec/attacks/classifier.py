# SPDX-License-Identifier: Apache-2.0
"""The attribute attacker's classifier: a small neural network, or without hidden layer logistic
regression.

Trained by Adam on class-balanced cross-entropy. Early stopping on a part of the training users
makes tuning unnecessary, and keeps an overfitting attacker from being mistaken for a private
system.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedrec.nn.optimisers import AdamW
from fedrec.rng import torch_stream

Attacker = Literal["neural", "logistic"]


@dataclass(frozen=True)
class Training:
    """How the classifier is trained.

    Attributes:
        hidden: units of the hidden layer of the neural attacker.
        learning_rate: of Adam.
        weight_decay: decoupled L2 decay per step.
        batch: users per step.
        epochs: most passes over the training users.
        patience: passes without a better validation loss after which training stops.
        validation: share of the training users that chooses the pass to keep, in (0, 1).
    """

    hidden: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    batch: int = 128
    epochs: int = 60
    patience: int = 8
    validation: float = 0.15


class Classifier:
    """Class scores from descriptions.

    Args:
        attacker: `"neural"` (one hidden layer, ReLU) or `"logistic"`.
        columns: width of a description.
        classes: number of classes.
        training: how it is trained.
        seed: of the stream `"attribute-classifier"`; `address` names one of several classifiers
            below it.
    """

    def __init__(
        self,
        attacker: Attacker,
        columns: int,
        classes: int,
        training: Training,
        seed: int,
        *address: int,
    ) -> None:
        self.classes = classes
        self.training = training
        self._random = torch_stream(seed, "attribute-classifier", *address)
        widths = [columns, training.hidden, classes] if attacker == "neural" else [columns, classes]
        self._layers = [
            (self._uniform(fan_in, fan_out), torch.zeros(fan_out))
            for fan_in, fan_out in itertools.pairwise(widths)
        ]

    def fit(self, described: np.ndarray, labels: np.ndarray) -> Classifier:
        """Train.

        Args:
            described: `float32 [users, columns]`.
            labels: `int64 [users]`, each in `[0, classes)`.
        """
        inputs = torch.from_numpy(described)
        targets = torch.from_numpy(labels)
        counts = torch.bincount(targets, minlength=self.classes).clamp(min=1)
        weight = len(labels) / (self.classes * counts.float())
        order = torch.randperm(len(labels), generator=self._random)
        held = max(1, round(self.training.validation * len(labels)))
        check = order[:held]
        learn = order[held:]
        leaves = [value.requires_grad_() for layer in self._layers for value in layer]
        rate = self.training.learning_rate
        decay = self.training.weight_decay
        optimiser = AdamW(leaves, lr=rate, weight_decay=decay)
        best = float("inf")
        kept = [leaf.detach().clone() for leaf in leaves]
        waited = 0
        for _ in range(self.training.epochs):
            shuffled = learn[torch.randperm(len(learn), generator=self._random)]
            for batch in shuffled.split(self.training.batch):
                optimiser.zero_grad()
                F.cross_entropy(
                    self._logits(inputs[batch]), targets[batch], weight=weight
                ).backward()
                optimiser.step()
            with torch.no_grad():
                loss = float(
                    F.cross_entropy(self._logits(inputs[check]), targets[check], weight=weight)
                )
            if loss < best:
                best = loss
                kept = [leaf.detach().clone() for leaf in leaves]
                waited = 0
            elif (waited := waited + 1) > self.training.patience:
                break
        self._layers = list(zip(kept[::2], kept[1::2], strict=True))
        return self

    def scores(self, described: np.ndarray) -> np.ndarray:
        """Chance of each class, `float64 [users, classes]`."""
        with torch.no_grad():
            return torch.softmax(self._logits(torch.from_numpy(described)).double(), 1).numpy()

    def _logits(self, inputs: Tensor) -> Tensor:
        for place, (weight, bias) in enumerate(self._layers):
            inputs = (F.relu(inputs) if place else inputs) @ weight + bias
        return inputs

    def _uniform(self, fan_in: int, fan_out: int) -> Tensor:
        bound = (6 / (fan_in + fan_out)) ** 0.5
        return (2 * torch.rand(fan_in, fan_out, generator=self._random) - 1) * bound
