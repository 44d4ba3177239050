# SPDX-License-Identifier: Apache-2.0
"""The canary clients of an audit in the data: another dataset with users without rows and features
added, and items that nobody has; and another split in which these users train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from fedrec.components.registry import DATASET, resolve
from fedrec.config import Config
from fedrec.data.features import FeatureTable
from fedrec.data.interactions import Interactions, more_ids
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.data.split import Partition, Split, partition_by, split_of
from fedrec.experiment.sections import Section, component_settings
from fedrec.privacy.adjacency import Adjacency


class CanaryUsersConfig(ReaderConfig):
    """Settings of a dataset with canaries; `path` and `verify` are those of the other dataset,
    below `base`."""

    base: dict[str, Any]
    """The other dataset: its name and settings."""
    count: int = Field(ge=1)
    """Number of users added; their indices follow those of the others."""
    items: int = Field(default=0, ge=0)
    """Number of items added, likewise."""


class CanaryUsers(Reader):
    """Adds users without rows to another dataset."""

    Config = CanaryUsersConfig
    title = "another dataset and canary users; for `fedrec audit`"
    config: CanaryUsersConfig

    def read(self) -> Interactions:
        """Read the other dataset and add users and items.

        Raises:
            DataError: see the other dataset.
        """
        data: Interactions = self._base().read()
        users = self.config.count
        items = self.config.items
        return replace(
            data,
            user_ids=more_ids(data.user_ids, users, "canary"),
            user_features=_longer(data.user_features, users),
            item_ids=more_ids(data.item_ids, items, "canary"),
            item_features=_longer(data.item_features, items),
        )

    def files(self) -> list[Path]:
        return self._base().files()

    def _base(self) -> Reader:
        section = Section.model_validate(self.config.base)
        settings = component_settings(DATASET, section, at="dataset.base")
        return resolve(DATASET, section.name)(section.name, settings)


def _longer(table: FeatureTable, count: int) -> FeatureTable:
    """The same features with rows added that have none."""
    return table.renumbered(np.append(np.arange(table.rows), np.full(count, -1)), table.rows)


class CanaryClientsConfig(Config):
    """Settings of a split with canaries."""

    base: dict[str, Any]
    """The other split: its name and settings."""
    count: int = Field(ge=1)
    """Number of canaries: the last so many users, who have no rows."""


class CanaryClients(Split):
    """Adds the last users, who have no rows, to the training clients of another split."""

    Config = CanaryClientsConfig
    config: CanaryClientsConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """As the other split."""
        return split_of(Section.model_validate(self.config.base), self.seed).depends_on(adjacency)

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions like the other split.

        Raises:
            DataError: see the other split.
        """
        base = Section.model_validate(self.config.base)
        partition = partition_by(base, self.seed, interactions)
        canaries = np.arange(interactions.num_users - self.config.count, interactions.num_users)
        training = np.union1d(partition.training_clients, canaries)
        return replace(partition, training_clients=training)
