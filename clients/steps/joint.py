# SPDX-License-Identifier: Apache-2.0
"""Local SGD on recommendation and self-supervision together (PrivRec section 2.4.3, equation 11).

    L = lambda_DSSM * L_DSSM + L_SSL,  L_SSL = lambda_IM * L_IM + lambda_SM * L_SM

Where this differs from the paper: the paper does not define a batch. Here batches of labelled
examples are those of local SGD, and the session views of an epoch are distributed evenly over its
batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import StepConfig
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

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work."""
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
