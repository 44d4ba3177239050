# SPDX-License-Identifier: Apache-2.0
"""Steps that train on a client's own sessions, alone or beside labelled examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from clients.local.descent import DescentConfig, DescentStep
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block, UserCodes
from fedrec.models.base import Model
from fedrec.pretext.blocks import SessionBlock, SessionObjective
from fedrec.pretext.task import SessionConfig, SessionTask
from fedrec.protocol.orders import COMPILED_RECURRENCE


class SessionStepConfig(DescentConfig, SessionConfig):
    """Settings of descent on sessions."""


class SessionStep(DescentStep):
    """Base of steps whose batches are `SessionBatches`."""

    config: SessionStepConfig

    def __init__(self, config: SessionStepConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.task = SessionTask(config, model)

    @property
    def compiled(self) -> str | None:
        """That of the recurrence."""
        return COMPILED_RECURRENCE if self.config.encoder == "gru" else None

    def objective(self) -> SessionObjective:
        """The loss on masked views of the client's sessions."""
        return SessionObjective(self.task)

    def block(self, users: UserCodes, batches: Sequence[Batches], device: torch.device) -> Block:
        """Put clients together, see `Block.of`."""
        return SessionBlock.of(users, batches, device)

    def added_parameters(
        self, model: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Fresh parameters of the encoders, which this step trains with those of the `model`."""
        return self.task.initial(model, generator)
