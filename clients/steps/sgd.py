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
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.steps.base import CohortStep, StepConfig, Update
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.descent import SgdSettings, descend
from fedrec.cohort.trained import Trained
from fedrec.data.negatives import draw_negatives
from fedrec.data.population import ClientData


class SgdConfig(StepConfig):
    """Settings of local SGD."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Step size (alpha1 in PrivRec)."""
    batch_size: int = Field(default=32, ge=1)
    """Examples per gradient step; the last batch of an epoch may be smaller."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Heavy-ball momentum; starts at zero in every round."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty added to the gradient."""
    proximal_mu: float = Field(default=0.0, ge=0)
    """Weight of FedProx's pull towards the global parameters; a server may also send it as `proximal-mu`."""
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
        local = {name: value.detach().unsqueeze(0).clone() for name, value in parameters.items()}
        buffers = {name: torch.zeros_like(value) for name, value in local.items()} if self.config.momentum else {}
        users = tuple(torch.from_numpy(codes).to(self.device).unsqueeze(0) for codes in data.features)
        examples, loss = 0, float("nan")
        for items, labels in self._epochs(data, random):
            examples = len(items)
            starts = range(0, examples, self.config.batch_size)
            batches = [slice(start, start + self.config.batch_size) for start in starts]
            losses = [self._descend(local, parameters, buffers, users, items[b], labels[b]) for b in batches]
            loss = float(torch.stack(losses).mean()) if losses else loss
        delta = {name: value.squeeze(0) - parameters[name] for name, value in local.items()}
        return Update(delta, examples, loss)

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """See `CohortStep.batches`: the same draws as in `update`."""
        return Batches.cut(list(self._epochs(data, random)), self.config.batch_size)

    def train_block(self, parameters: Mapping[str, Tensor], block: Block) -> Trained:
        """See `CohortStep.train_block`."""
        config = self.config
        sgd = SgdSettings(config.learning_rate, config.momentum, config.weight_decay, config.proximal_mu)
        return descend(self.model, parameters, block, sgd)

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

    def _descend(
        self,
        local: dict[str, Tensor],
        anchor: Mapping[str, Tensor],
        buffers: dict[str, Tensor],
        users: tuple[Tensor, ...],
        items: np.ndarray,
        labels: np.ndarray,
    ) -> Tensor:
        """One gradient step on one batch, in place; returns its loss before the step."""
        leaves = {name: value.requires_grad_() for name, value in local.items()}
        batch, wanted = torch.tensor(items[None], device=self.device), torch.tensor(labels[None], device=self.device)
        loss = self.model.loss(self.model.predict(leaves, users, batch), wanted).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        with torch.no_grad():
            for (name, value), gradient in zip(leaves.items(), gradients, strict=True):
                if self.config.weight_decay:
                    gradient = gradient + self.config.weight_decay * value
                if self.config.proximal_mu:
                    gradient = gradient + self.config.proximal_mu * (value - anchor[name])
                if self.config.momentum:
                    gradient = buffers[name].mul_(self.config.momentum).add_(gradient)
                value.detach_().sub_(gradient, alpha=self.config.learning_rate)
        return loss.detach()
