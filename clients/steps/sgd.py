# SPDX-License-Identifier: Apache-2.0
"""Local mini-batch SGD on one client's data (PrivRec algorithm 1, lines 9 to 18).

`update` is the reference: one client at a time, full tables, autograd. `train_block` does the same for many clients at
once (`fedrec.cohort`), from the same random draws.

Where this differs from the paper: it gives no learning rate, batch size or number of negatives, so they are settings.
The paper turns ratings of 3 and below into negatives; here `low-rated` chooses, and unobserved items are drawn as
further negatives, because ranking is against items the user never saw.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.steps._descent import DescentConfig, LocalDescent
from clients.steps.base import CohortStep, Update
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.descent import descend
from fedrec.cohort.trained import Trained
from fedrec.data.negatives import draw_negatives
from fedrec.data.population import ClientData
from fedrec.pretext.encoder import recommender_part


class SgdConfig(DescentConfig):
    """Settings of local SGD."""

    negatives: int = Field(default=4, ge=0)
    """Unobserved items per positive (ranking only), drawn uniformly outside the training positives."""
    negatives_policy: Literal["round", "epoch"] = "round"
    """`round`: one pool per round; `epoch`: drawn anew for each epoch, touching more of the catalogue."""
    low_rated: Literal["ignore", "negative"] = "ignore"
    """What a training row that is not positive counts as (ranking only)."""
    private_parameters: tuple[str, ...] = ()
    """Patterns of parameters that stay on the device between rounds and are never sent, such as `layer4.*`."""


class Sgd(CohortStep):
    """Plain local SGD."""

    Config = SgdConfig
    paper = "PrivRec (Wang et al. 2021), algorithm 1"
    config: SgdConfig

    def update(self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator) -> Update:
        """See `Step.update`."""
        descent = LocalDescent(recommender_part(parameters), self.config.sgd())
        users = tuple(torch.from_numpy(codes).to(self.device).unsqueeze(0) for codes in data.features)
        examples, loss = 0, float("nan")
        for items, labels in self._epochs(data, random):
            examples = len(items)
            starts = range(0, examples, self.config.batch_size)
            batches = [slice(start, start + self.config.batch_size) for start in starts]
            losses = [descent.step(self._loss(users, items[batch], labels[batch])) for batch in batches]
            loss = float(torch.stack(losses).mean()) if losses else loss
        return Update(descent.delta(parameters), examples, loss)

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """See `CohortStep.batches`: the same draws as in `update`."""
        return Batches.cut(list(self._epochs(data, random)), self.config.batch_size)

    def train_block(self, parameters: Mapping[str, Tensor], block: Block) -> Trained:
        """See `CohortStep.train_block`."""
        trained = descend(self.model, recommender_part(parameters), block, self.config.sgd())
        return replace(trained, start=parameters)

    def private_names(self, names: list[str]) -> list[str]:
        """See `Step.private_names`."""
        return [
            name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in self.config.private_parameters)
        ]

    @property
    def keeps(self) -> bool:
        """See `Step.keeps`."""
        return bool(self.config.private_parameters)

    def _epochs(self, data: ClientData, random: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Items and labels of each epoch, in the order of training."""
        pool = None
        for _ in range(self.config.epochs):
            if pool is None or self.config.negatives_policy == "epoch":
                pool = self._examples(data, random)
            order = random.permutation(len(pool[0]))
            yield pool[0][order], pool[1][order]

    def _examples(self, data: ClientData, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        items, labels = data.items, data.labels
        if self.model.schema.task == "rating":
            return items, labels
        if self.config.low_rated == "ignore":
            items, labels = items[labels > 0], labels[labels > 0]
        count = self.config.negatives * int((labels > 0).sum())
        if not count:
            return items, labels
        drawn = draw_negatives(data.positives, self.model.schema.num_items, count, random)
        return np.concatenate([items, drawn]), np.concatenate([labels, np.zeros(count, dtype=np.float32)])

    def _loss(
        self, users: tuple[Tensor, ...], items: np.ndarray, labels: np.ndarray
    ) -> Callable[[dict[str, Tensor]], Tensor]:
        """The loss of one client on a batch, as a function of its parameters."""
        batch, wanted = torch.tensor(items[None], device=self.device), torch.tensor(labels[None], device=self.device)
        return lambda parameters: self.model.loss(self.model.predict(parameters, users, batch), wanted)
