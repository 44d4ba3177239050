# SPDX-License-Identifier: Apache-2.0
"""Another split, with the canary clients of an audit among the training clients."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from fedrec.components.registry import SPLIT, resolve
from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.split import Partition, Split
from fedrec.experiment.sections import Section, component_settings


class CanariesConfig(Config):
    """Settings of a split with canaries."""

    base: dict[str, Any] = Field(default_factory=lambda: {"name": "user-holdout"})
    """The other split: its name and settings."""
    count: int = Field(1000, ge=1)
    """Number of canaries: the last so many users, who have no rows."""


class Canaries(Split):
    """Adds the last users, who have no rows, to the training clients of another split; for
    `fedrec audit`."""

    Config = CanariesConfig
    simulations_only = True
    config: CanariesConfig

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions like the other split.

        Raises:
            DataError: see the other split.
        """
        section = Section.model_validate(self.config.base)
        base = resolve(SPLIT, section.name)(
            component_settings(SPLIT, section, at="split.base"), self.seed
        )
        partition = base.split(interactions)
        canaries = np.arange(interactions.num_users - self.config.count, interactions.num_users)
        training = np.union1d(partition.training_clients, canaries)
        return Partition(
            training, partition.train_rows, partition.validation_rows, partition.test_rows
        )
