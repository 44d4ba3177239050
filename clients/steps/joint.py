# SPDX-License-Identifier: Apache-2.0
"""Local SGD on recommendation and self-supervision together (PrivRec section 2.4.3, equation 11).

    L = lambda_DSSM * L_DSSM + L_SSL,  L_SSL = lambda_IM * L_IM + lambda_SM * L_SM

Where this differs from the paper: the paper does not define a batch. Here batches of labelled
examples are those of local SGD, and the session views of an epoch are distributed evenly over its
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.local.descent import LocalDescent
from clients.step import StepConfig, Update
from clients.steps.sgd import Sgd, SgdConfig
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.descent import Recommending, descend
from fedrec.cohort.results import Trained
from fedrec.data.client_data import ClientData
from fedrec.models.base import Model
from fedrec.pretext.blocks import SessionBatches, SessionBlock, SessionObjective
from fedrec.pretext.task import SessionConfig, SessionTask


class JointConfig(SgdConfig, SessionConfig):
    """Settings of local SGD and of the self-supervised task."""

    lambda_dssm: float = Field(default=1.0, ge=0)
    """Weight of the recommender's loss (lambda_DSSM, eq. 11)."""


class Joint(Sgd):
    """Local SGD on the recommender's loss plus the loss on masked views of the client's
    sessions."""

    Config = JointConfig
    paper = "PrivRec (Wang et al. 2021), eq. 11"
    config: JointConfig

    def __init__(self, config: StepConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.task = SessionTask(self.config, model)

    def update(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        """Train on one client's data, starting from the global `parameters` (without cohort
        dimension, unchanged). Views count as examples only for a client without labelled ones."""
        sgd = self._settings(list(parameters))
        size = self.config.batch_size
        descent = LocalDescent(parameters, sgd)
        users = tuple(
            torch.from_numpy(codes).to(self.device).unsqueeze(0) for codes in data.features
        )
        examples = 0
        loss = float("nan")
        for epoch, ((items, labels), views) in enumerate(self._joint_epochs(data, random)):
            held = self._held(sgd, epoch)
            examples = len(items) or len(views)
            parts = np.array_split(views, -(-examples // size) or 1)
            batches = [slice(start, start + size) for start in range(0, len(parts) * size, size)]
            losses = [
                descent.step(self._joint_loss(users, items[batch], labels[batch], part), held)
                for batch, part in zip(batches, parts, strict=True)
                if examples
            ]
            loss = float(torch.stack(losses).mean()) if losses else loss
        return Update(descent.delta(parameters), examples, loss)

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work, from the same random draws as `update`."""
        epochs = list(self._joint_epochs(data, random))
        plain = Batches.cut([examples for examples, _ in epochs], self.config.batch_size)
        return SessionBatches.deal(
            plain, [views for _, views in epochs], self.config.batch_size, self.task.layout
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
        objective = SessionObjective(self.task, Recommending(self.model), self.config.lambda_dssm)
        return descend(
            self.model, parameters, block, self._settings(list(parameters)), objective, own
        )

    def added_parameters(
        self, model: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Fresh parameters of the encoders, which this step trains with those of the `model`."""
        return self.task.initial(model, generator)

    def _joint_epochs(
        self, data: ClientData, random: np.random.Generator
    ) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], np.ndarray]]:
        """Examples (items, labels) and views of each epoch, in the order of training."""
        for examples in self._epochs(data, random):
            yield examples, self.task.views(data, random)

    def _joint_loss(
        self, users: tuple[Tensor, ...], items: np.ndarray, labels: np.ndarray, views: np.ndarray
    ) -> Callable[[dict[str, Tensor]], Tensor]:
        """The loss of one client on a batch, as a function of its parameters."""
        batch = torch.tensor(views[None], device=self.device)
        recommending = self._loss(users, items, labels)

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            supervised = self.config.lambda_dssm * recommending(parameters) if len(items) else 0.0
            return supervised + self.task.loss_from_table(parameters, batch)

        return loss
