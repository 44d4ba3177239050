# SPDX-License-Identifier: Apache-2.0
"""Another step, except that some clients are malicious: they send the opposite of what they
learned, magnified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.local.updates import Updates
from clients.step import Step, StepConfig
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.components import registry
from fedrec.data.client_data import ClientData
from fedrec.experiment.sections import Section, component_settings
from fedrec.models.base import Model
from fedrec.rng import stream


class PoisonedConfig(StepConfig):
    """Settings of a step with malicious clients."""

    base: dict[str, Any] = Field(default_factory=lambda: {"name": "sgd"})
    """Name and settings of the other step; `epochs` is set beside it."""
    share: float = Field(default=0.2, ge=0, lt=1)
    """Share of the clients that are malicious, each by itself."""
    factor: float = Field(default=-10.0)
    """What a malicious client multiplies its update by."""
    seed: int = Field(default=0, ge=0)
    """Seed of who is malicious (stream `"malicious"`)."""


class Poisoned(Step):
    """Honest clients run the other step as it is, in blocks where it can."""

    Config = PoisonedConfig
    config: PoisonedConfig

    def __init__(self, config: PoisonedConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        section = Section.model_validate({**config.base, "epochs": config.epochs})
        settings = component_settings(registry.STEP, section, at="step.base")
        self.base: Step = registry.resolve(registry.STEP, section.name)(settings, model, device)

    def malicious(self, clients: np.ndarray) -> np.ndarray:
        """`bool [n]`: which clients are malicious."""
        draws = [stream(self.config.seed, "malicious", int(client)).random() for client in clients]
        return np.array(draws, dtype=float) < self.config.share

    def assign(self, clients: np.ndarray) -> Iterator[tuple[Step, np.ndarray]]:
        """Which step works for which of a round's clients, `int64` each; this one for all of them
        by default."""
        malicious = self.malicious(clients)
        yield self.base, clients[~malicious]
        yield self, clients[malicious]

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """Those of the other step."""
        return self.base.batches(data, random)

    def block(
        self,
        users: Sequence[tuple[np.ndarray, ...]],
        batches: Sequence[Batches],
        device: torch.device,
    ) -> Block:
        """That of the other step."""
        return self.base.block(users, batches, device)

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> Updates:
        """The other step's updates of malicious clients, multiplied."""
        found = self.base.train_block(parameters, block, own)
        each = [found.changes_of(place) for place in range(len(block))]
        factor = self.config.factor
        changes = {name: factor * torch.stack([one[name] for one in each]) for name in parameters}
        return Updates(parameters, found.block, changes, found.losses(), own or {})
