# SPDX-License-Identifier: Apache-2.0
"""The step of audits: canaries upload fixed updates, all other clients run another step.

Sampler, clip, sum and noise treat a canary like any other client, and these are what an audit
tests. The other clients do exactly the same as without an audit, in blocks if their step supports
it. Symmetric matrices are summed as whole squares, as their noise is measured in the antisymmetric
part (`fedrec.attacks.audit.directions`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

import numpy as np
import torch
from pydantic import ConfigDict, model_validator
from torch import Tensor

from clients.local.one_by_one import Update, one_by_one
from clients.local.updates import Updates
from clients.step import Step, StepConfig
from fedrec.attacks.audit.canaries import CanaryPlan
from fedrec.attacks.audit.directions import Directions
from fedrec.cohort.block import Block
from fedrec.components import registry
from fedrec.data.client_data import ClientData
from fedrec.experiment.sections import Section, component_settings
from fedrec.models.base import Model
from fedrec.privacy.adjacency import Contributions


class CanaryConfig(StepConfig):
    """Settings of a step with canaries; all further keys are settings of the other step."""

    model_config = ConfigDict(extra="allow")

    base: str = "sgd"
    """Name of the other step."""
    canaries: CanaryPlan
    """The canaries, and what they upload."""

    @model_validator(mode="after")
    def _settings_of_the_other_step_are_right(self) -> Self:
        self.other()
        return self

    def other(self) -> StepConfig:
        """Settings of the other step.

        Raises:
            ExperimentError: one of them is unknown or wrong.
        """
        section = Section.model_validate(
            {**(self.model_extra or {}), "name": self.base, "epochs": self.epochs}
        )
        return component_settings(registry.STEP, section, at="step")

    @property
    def contributions(self) -> Contributions:
        """Of the other step: the canaries' uploads are of the same kind."""
        return registry.resolve(registry.STEP, self.base).contributions


class Canary(Step):
    """Uploads fixed updates for the canaries; all other clients run another step.

    Raises:
        ExperimentError: a setting of the other step is wrong.
    """

    Config = CanaryConfig
    paper = "Steinke et al. 2023; Andrew et al. 2023"
    config: CanaryConfig

    def __init__(self, config: CanaryConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.base: Step = registry.resolve(registry.STEP, config.base)(
            config.other(), model, device
        )
        self._directions: Directions | None = None

    def assign(self, clients: np.ndarray) -> Iterator[tuple[Step, np.ndarray]]:
        """This step for the canaries among a round's clients, the other step for the others;
        `int64 [clients]` each."""
        canary = self.config.canaries.is_canary(clients)
        yield self.base, clients[~canary]
        yield self, clients[canary]

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> Updates:
        """The fixed updates of a block of canaries."""
        return one_by_one(parameters, block, own, self._fixed)

    def _fixed(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        plan = self.config.canaries
        delta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        if self._directions is None:
            shapes = {name: tuple(value.shape) for name, value in parameters.items()}
            self._directions = Directions(plan, getattr(self.model, "room", {}), shapes)
        for name, (places, values) in self._directions.upload(data.client).items():
            flat = delta[name].view(-1)
            flat[torch.from_numpy(places).to(flat.device)] = torch.from_numpy(values).to(flat)
        return Update(delta, plan.examples)

    def added_parameters(
        self, model: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Fresh parameters that this step trains with those of the `model`."""
        return self.base.added_parameters(model, generator)

    def private_names(self, names: list[str]) -> list[str]:
        """The parameters among `names` that stay on the device between rounds and are never
        sent."""
        return self.base.private_names(names)

    @property
    def private_patterns(self) -> tuple[str, ...]:
        """Patterns of private parameter names, each of which must match a parameter."""
        return self.base.private_patterns

    @property
    def uploads(self) -> int | None:
        """Largest number of rounds that a client may take part in, which its device enforces; None:
        any number."""
        return self.base.uploads

    @property
    def keeps(self) -> bool:
        """Whether state stays on the device: private parameters, or the number of rounds that it
        took part in."""
        return self.base.keeps
