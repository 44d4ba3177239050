# SPDX-License-Identifier: Apache-2.0
"""Self-supervised training of the item embedding on a client's own sessions (PrivRec section 2.4.2,
equations 8 to 10).

No label and no feature of the user is used: stage one of the two-stage training. Only the item
embedding and the encoders of sessions and items (`session.*`) are trained; no other parameter
changes, not even by weight decay.

Where this differs from the paper: see `fedrec/pretext/views.py` and `contrast.py`. The paper does
not give learning rate, batch size and epochs of stage one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from clients.local.descent import DescentConfig, LocalDescent
from clients.step import CohortStep, StepConfig, Update
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.descent import descend
from fedrec.cohort.results import Trained
from fedrec.data.client_data import ClientData
from fedrec.models.base import Model
from fedrec.pretext.blocks import SessionBatches, SessionBlock, SessionObjective
from fedrec.pretext.encoder import PREFIX
from fedrec.pretext.task import SessionConfig, SessionTask

_NO_EXAMPLES = np.zeros((0, 0))


class ContrastiveConfig(DescentConfig, SessionConfig):
    """Settings of self-supervised training; a batch is of pairs of views."""


class Contrastive(CohortStep):
    """Local SGD on masked views of the client's sessions."""

    Config = ContrastiveConfig
    paper = "PrivRec (Wang et al. 2021), eq. 8-10"
    config: ContrastiveConfig

    def __init__(self, config: StepConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.task = SessionTask(self.config, model)

    def update(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        """Train on one client's data, starting from the global `parameters` (without cohort
        dimension, unchanged). An example is a pair of views."""
        descent = LocalDescent(self._trained(parameters), self.config.sgd())
        examples = 0
        loss = float("nan")
        for views in self._epochs(data, random):
            examples = len(views)
            parts = np.array_split(views, -(-examples // self.config.batch_size) or 1)
            losses = [descent.step(self._loss(part)) for part in parts if len(part)]
            loss = float(torch.stack(losses).mean()) if losses else loss
        return Update(descent.delta(parameters), examples, loss)

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work, from the same random draws as `update`."""
        none = Batches(
            _NO_EXAMPLES.astype(np.int64),
            _NO_EXAMPLES.astype(np.float32),
            np.zeros(0, np.int64),
            0,
            0,
        )
        return SessionBatches.deal(
            none, list(self._epochs(data, random)), self.config.batch_size, self.task.layout
        )

    def block(
        self,
        users: Sequence[tuple[np.ndarray, ...]],
        batches: Sequence[Batches],
        device: torch.device,
    ) -> Block:
        """Put clients together, see `Block.of`."""
        return SessionBlock.of(users, batches, device)

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> Trained:
        """Train every client of a block."""
        objective = SessionObjective(self.task)
        trained = descend(
            self.model, self._trained(parameters), block, self.config.sgd(), objective
        )
        return replace(trained, start=parameters)

    def added_parameters(
        self, model: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Fresh parameters of the encoders, which this step trains with those of the `model`."""
        return self.task.initial(model, generator)

    def _trained(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            n: value
            for n, value in parameters.items()
            if n == self.task.table or n.startswith(PREFIX)
        }

    def _epochs(self, data: ClientData, random: np.random.Generator) -> Iterator[np.ndarray]:
        """The views of each epoch, in the order of training."""
        for _ in range(self.config.epochs):
            yield self.task.views(data, random)

    def _loss(self, views: np.ndarray) -> Callable[[dict[str, Tensor]], Tensor]:
        """The loss of one client on a batch of views, as a function of its parameters."""
        batch = torch.tensor(views[None], device=self.device)
        return lambda parameters: self.task.loss_from_table(parameters, batch)
