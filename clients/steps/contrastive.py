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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from clients.local.descent import DescentConfig
from clients.step import Step, StepConfig
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


class Contrastive(Step):
    """Local SGD on masked views of the client's sessions."""

    Config = ContrastiveConfig
    paper = "PrivRec (Wang et al. 2021), eq. 8-10"
    config: ContrastiveConfig

    def __init__(self, config: StepConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.task = SessionTask(self.config, model)

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work."""
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
