# SPDX-License-Identifier: Apache-2.0
"""Another model with additional rows in its parameters that nothing depends on, for the canaries of
an audit.

The catalogue does not change, so the rows of item tables are never drawn as negatives, scored or
recommended. Those of other parameters are cut off before the model computes anything.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedrec.components.registry import MODEL, resolve
from fedrec.config import Config
from fedrec.data.schema import Schema
from fedrec.experiment.sections import Section, component_settings
from fedrec.models.base import Model, Parameters, Users
from fedrec.nn.declaration import KernelModel


class ReservedConfig(Config):
    """Settings of a model with reserved rows."""

    base: dict[str, Any]
    """The base model: its name and settings."""
    rows: int = Field(ge=1)
    """Number of rows appended to each item table, initially zero; other parameters share as many
    among them."""
    parameters: tuple[str, ...] = ()
    """Patterns of other parameters that get rows, too; then native code does not train the
    model."""


class Reserved(Model):
    """Adds rows to the parameters of another model."""

    Config = ReservedConfig
    config: ReservedConfig

    def __init__(self, config: ReservedConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        section = Section.model_validate(config.base)
        self.base: Model = resolve(MODEL, section.name)(
            component_settings(MODEL, section, at="model.base"), schema
        )
        # item tables of the other model
        self.item_tables = self.base.item_tables  # type: ignore[misc]
        self.products = self.base.products  # type: ignore[misc]

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh global parameters `float32`, without the cohort dimension, drawn from `generator`
        on the CPU. The other model's own rows have the same values as without reserved rows."""
        parameters = self.base.initial(generator)
        for name, rows in self.room.items():
            table = parameters[name]
            parameters[name] = torch.cat([table, table.new_zeros(rows, *table.shape[1:])])
        return parameters

    @cached_property
    def room(self) -> dict[str, int]:
        """Number of rows added to each parameter that has any; item tables first."""
        others = [
            name
            for name, value in self.base.initial(torch.Generator()).items()
            if value.ndim
            and name not in self.item_tables
            and any(fnmatchcase(name, pattern) for pattern in self.config.parameters)
        ]
        share = -(-self.config.rows // max(len(others), 1))
        return {**dict.fromkeys(self.item_tables, self.config.rows), **dict.fromkeys(others, share)}

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`."""
        return self.base.predict(self._own(parameters), users, items, rows)

    def kernel(self) -> KernelModel | None:
        """The declaration for native code; None if native code does not support the model."""
        return self.base.declared_kernel() if set(self.room) <= set(self.item_tables) else None

    def loss(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean loss over the last dimension, `[C, B] -> [C]`: cross-entropy (PrivRec eq. 2) or
        squared error."""
        return self.base.loss(predictions, labels, weights)

    def scores(self, parameters: Parameters, users: Users) -> Tensor:
        """Scores of the whole catalogue for each slice of the cohort dimension,
        `[C, num_items]`."""
        return self.base.scores(self._own(parameters), users)

    def _own(self, parameters: Parameters) -> Parameters:
        """The parameters `[C, ...]` as the other model has them; item tables may keep their rows,
        or be compact."""
        cut = {name: rows for name, rows in self.room.items() if name not in self.item_tables}
        return {
            name: value[:, : -cut[name]] if name in cut else value
            for name, value in parameters.items()
        }
