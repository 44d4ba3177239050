# SPDX-License-Identifier: Apache-2.0
"""Local mini-batch SGD on one client's data (PrivRec algorithm 1, lines 9 to 18).

The reference: one client at a time, full tables, autograd. Faster paths are compared with it.

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

from clients.steps.base import Step, StepConfig, Update
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


class Sgd(Step):
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
            batches = torch.from_numpy(random.permutation(examples)).split(self.config.batch_size)
            losses = [
                self._descend(local, parameters, buffers, users, items[batch], labels[batch])
                for batch in batches
                if len(batch)  # a client without data still splits into one empty batch
            ]
            loss = float(torch.stack(losses).mean()) if losses else loss
        delta = {name: value.squeeze(0) - parameters[name] for name, value in local.items()}
        return Update(delta, examples, loss)

    def private_names(self, names: list[str]) -> list[str]:
        """See `Step.private_names`."""
        return [
            name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in self.config.private_parameters)
        ]

    def _epochs(self, data: ClientData, random: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        examples = None
        for _ in range(self.config.epochs):
            if examples is None or self.config.negatives_policy == "epoch":
                examples = self._examples(data, random)
            yield examples

    def _examples(self, data: ClientData, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        items, labels = data.items, data.labels
        if self.model.schema.task == "ranking":
            if self.config.low_rated == "ignore":
                items, labels = items[labels > 0], labels[labels > 0]
            count = self.config.negatives * int((labels > 0).sum())
            if count:
                drawn = draw_negatives(data.positives, self.model.schema.num_items, count, random)
                items = np.concatenate([items, drawn])
                labels = np.concatenate([labels, np.zeros(count, dtype=np.float32)])
        return torch.tensor(items, device=self.device), torch.tensor(labels, device=self.device)

    def _descend(
        self,
        local: dict[str, Tensor],
        anchor: Mapping[str, Tensor],
        buffers: dict[str, Tensor],
        users: tuple[Tensor, ...],
        items: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """One gradient step on one batch, in place; returns its loss before the step."""
        leaves = {name: value.requires_grad_() for name, value in local.items()}
        loss = self.model.loss(self.model.predict(leaves, users, items.unsqueeze(0)), labels.unsqueeze(0)).sum()
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
