# SPDX-License-Identifier: Apache-2.0
"""Mini-batch gradient descent on an objective, of many clients at once."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from clients.step import Step, StepConfig
from fedrec.cohort.block import Block
from fedrec.cohort.descent import Objective, descend
from fedrec.cohort.results import Trained
from fedrec.cohort.sgd import SgdSettings
from fedrec.models.base import Parameters


class GradientConfig(StepConfig):
    """Settings of steps with gradient descent."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Learning rate (alpha1 in PrivRec)."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Heavy-ball momentum; starts at zero in every round."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty added to the gradient."""
    proximal_mu: float = Field(default=0.0, ge=0)
    """Weight of FedProx's proximal term; a server may also send it as `proximal-mu`."""

    def sgd(self) -> SgdSettings:
        """The settings for training in blocks."""
        return SgdSettings(self.learning_rate, self.momentum, self.weight_decay, self.proximal_mu)


class DescentConfig(GradientConfig):
    """The same on batches of a client's examples."""

    batch_size: int = Field(default=32, ge=1)
    """Examples per gradient step; the last batch of an epoch may be smaller."""


class DescentStep(Step):
    """Base of steps of gradient descent: on the model's own loss and on all parameters,
    unless a subclass says otherwise."""

    config: GradientConfig

    def objective(self) -> Objective | None:
        """What is minimised; None: the model's own loss."""
        return None

    def trained(self, parameters: Parameters) -> Parameters:
        """Those of the global parameters that are trained."""
        return parameters

    def settings(self, names: list[str]) -> SgdSettings:
        """Settings of the gradient steps for the parameters of these names."""
        return self.config.sgd()

    def refuse_misfits(self, parameters: Parameters) -> None:
        """Refuse settings by parameter names that fit none."""
        self.settings(list(self.trained(parameters)))

    def train_block(
        self, parameters: Parameters, block: Block, own: Parameters | None = None
    ) -> Trained:
        """Train every client of a block."""
        trained = self.trained(parameters)
        settings = self.settings(list(trained))
        found = descend(self.model, trained, block, settings, self.objective(), own)
        return replace(found, start=parameters)
