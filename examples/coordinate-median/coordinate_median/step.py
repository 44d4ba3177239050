# SPDX-License-Identifier: Apache-2.0
"""Another step, except that some clients are malicious: they send the opposite of what they
learned, magnified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig, Update
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

    def update(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        """The other step's update, a malicious client's multiplied."""
        found = self.base.update(parameters, data, random)
        if not self.malicious(np.array([data.client]))[0]:
            return found
        delta = {name: self.config.factor * value for name, value in found.delta.items()}
        return Update(delta, found.examples, found.loss)
