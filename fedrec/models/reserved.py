# SPDX-License-Identifier: Apache-2.0
"""Another model with additional rows in its item tables that belong to no item, for the canaries of
an audit.

The catalogue does not change, so these rows are never drawn as negatives, scored or recommended.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedrec.components.registry import MODEL, resolve
from fedrec.config import Config
from fedrec.data.schema import Schema
from fedrec.experiment.sections import Section, component_settings
from fedrec.models.base import Model, Parameters
from fedrec.nn.declaration import KernelModel


class ReservedConfig(Config):
    """Settings of a model with reserved rows."""

    base: dict[str, Any] = Field(default_factory=lambda: {"name": "privrec"})
    """The base model: its name and settings."""
    rows: int = Field(1000, ge=1)
    """Number of rows appended to each item table, initially zero."""


class Reserved(Model):
    """Adds rows to the item tables of another model; for `fedrec audit`."""

    Config = ReservedConfig
    simulations_only = True
    config: ReservedConfig

    def __init__(self, config: ReservedConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        section = Section.model_validate(config.base)
        self.base: Model = resolve(MODEL, section.name)(
            component_settings(MODEL, section, at="model.base"), schema
        )
        # item tables of the other model
        self.item_tables = self.base.item_tables  # type: ignore[misc]

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh global parameters `float32`, without the cohort dimension, drawn from `generator`
        on the CPU. The other model's own rows have the same values as without reserved rows."""
        parameters = self.base.initial(generator)
        for name in self.item_tables:
            table = parameters[name]
            parameters[name] = torch.cat(
                [table, table.new_zeros(self.config.rows, *table.shape[1:])]
            )
        return parameters

    def predict(
        self,
        parameters: Parameters,
        users: tuple[Tensor, ...],
        items: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`."""
        return self.base.predict(parameters, users, items, rows)

    def kernel(self) -> KernelModel | None:
        """The declaration for native code; None if native code does not support the model."""
        return self.base.declared_kernel()

    def loss(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean loss over the last dimension, `[C, B] -> [C]`: cross-entropy (PrivRec eq. 2) or
        squared error."""
        return self.base.loss(predictions, labels, weights)

    def scores(self, parameters: Parameters, users: tuple[Tensor, ...]) -> Tensor:
        """Scores of the whole catalogue for each slice of the cohort dimension,
        `[C, num_items]`."""
        return self.base.scores(parameters, users)
