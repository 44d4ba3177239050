# SPDX-License-Identifier: Apache-2.0
"""Another model, whose item tables have rows that belong to no item: room for the canaries of an audit.

The catalogue stays as it is, so these rows are never drawn as negatives, scored or recommended.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedrec.cohort.kernel.declaration import KernelModel
from fedrec.config import Config
from fedrec.experiment import Section, component_settings
from fedrec.models.base import Model, Parameters, Schema
from fedrec.registry import MODEL, resolve


class ReservedConfig(Config):
    """Settings of a model with reserved rows."""

    base: dict[str, Any] = Field(default_factory=lambda: {"name": "privrec"})
    """The other model: its name and settings."""
    rows: int = Field(1000, ge=1)
    """Number of rows added at the end of each item table; zero at first."""


class Reserved(Model):
    """Adds rows to the item tables of another model; for `fedrec audit`."""

    Config = ReservedConfig
    config: ReservedConfig

    def __init__(self, config: ReservedConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        section = Section.model_validate(config.base)
        self.base: Model = resolve(MODEL, section.name)(component_settings(MODEL, section, at="model.base"), schema)
        self.item_tables = self.base.item_tables  # type: ignore[misc]  # those of the other model, not of this class

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """See `Model.initial`; the other model's own values are those it has without reserved rows."""
        parameters = self.base.initial(generator)
        for name in self.item_tables:
            table = parameters[name]
            parameters[name] = torch.cat([table, table.new_zeros(self.config.rows, *table.shape[1:])])
        return parameters

    def predict(
        self, parameters: Parameters, users: tuple[Tensor, ...], items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """See `Model.predict`."""
        return self.base.predict(parameters, users, items, rows)

    def kernel(self) -> KernelModel | None:
        """See `Model.kernel`."""
        return self.base.declared_kernel()

    def loss(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """See `Model.loss`."""
        return self.base.loss(predictions, labels, weights)

    def scores(self, parameters: Parameters, users: tuple[Tensor, ...]) -> Tensor:
        """See `Model.scores`."""
        return self.base.scores(parameters, users)
