# SPDX-License-Identifier: Apache-2.0
"""Another dataset, with users added who have neither rows nor features, the canary clients of an
audit, and items that nobody has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from fedrec.components.registry import DATASET, resolve
from fedrec.data.features import Feature, FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.experiment.sections import Section, component_settings


class CanariesConfig(ReaderConfig):
    """Settings of a dataset with canaries; `path` and `verify` are those of the other dataset,
    below `base`."""

    base: dict[str, Any] = Field(default_factory=lambda: {"name": "synthetic"})
    """The base dataset: its name and settings."""
    count: int = Field(1000, ge=1)
    """Number of users added; their indices follow those of the others."""
    items: int = Field(0, ge=0)
    """Number of items added, likewise."""


class Canaries(Reader):
    """Adds users without rows to another dataset."""

    Config = CanariesConfig
    title = "another dataset and canary users; for `fedrec audit`"
    config: CanariesConfig

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
            user_ids=_more_ids(data.user_ids, users),
            user_features=_longer(data.user_features, users),
            item_ids=_more_ids(data.item_ids, items),
            item_features=_longer(data.item_features, items),
        )

    def files(self) -> list[Path]:
        return self._base().files()

    def _base(self) -> Reader:
        section = Section.model_validate(self.config.base)
        settings = component_settings(DATASET, section, at="dataset.base")
        return resolve(DATASET, section.name)(section.name, settings)


def _longer(table: FeatureTable, count: int) -> FeatureTable:
    """The same features with rows added that have no code."""
    features = tuple(_extended(feature, count) for feature in table.features)
    return FeatureTable(table.rows + count, features)


def _extended(feature: Feature, count: int) -> Feature:
    """The same feature with rows added that have no code."""
    offsets = np.concatenate([feature.offsets, np.full(count, feature.offsets[-1])])
    return Feature(feature.name, feature.categories, offsets, feature.codes)


def _more_ids(ids: np.ndarray, count: int) -> np.ndarray:
    if np.issubdtype(ids.dtype, np.integer):
        return np.concatenate([ids, ids.max(initial=-1) + 1 + np.arange(count)])
    taken = set(map(str, ids.tolist()))
    free = [name for number in range(len(ids) + count) if (name := f"canary-{number}") not in taken]
    return np.concatenate(
        [ids, np.array(free[:count], dtype=object if ids.dtype == object else np.str_)]
    )
