# SPDX-License-Identifier: Apache-2.0
"""Canaries of an audit: model, step, data, and the experiment with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from clients.malicious import PlantedStep
from clients.step import StepConfig
from clients.steps.descent import Update, one_by_one
from fedrec.attacks.canaries import CanaryPlan, Directions, Kind
from fedrec.components import registry
from fedrec.components.registry import DATASET, MODEL, STEP, STRATEGY, resolve
from fedrec.components.sections import Section, component_of, component_settings, fields_of
from fedrec.config import Config, fits
from fedrec.data.client_data import ClientData
from fedrec.data.interactions import Interactions, Schema, more_ids
from fedrec.data.population import Population
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.data.splits.rules import Partition, Split, partition_by
from fedrec.experiment.phases import Phase, contributions_of, phases_of, step_table
from fedrec.experiment.schema import Experiment
from fedrec.models.base import HistoryModel, Model, Parameters, Users
from fedrec.models.linear import ProductsModel
from fedrec.nn.layers import KernelModel
from fedrec.privacy.accounting.sampling import Adjacency, Contributions
from fedrec.training.block import Block
from fedrec.training.results import BlockUpdate

# Another model with additional rows in its parameters that nothing depends on, for the canaries of
# an audit.
#
# The catalogue does not change, so the rows of item tables are never drawn as negatives, scored or
# recommended. Those of other parameters are cut off before the model computes anything.


class ReservedConfig(Config):
    """Settings of a model with reserved rows."""

    base: dict[str, Any]
    """The base model: its name and settings."""
    rows: int = Field(ge=1)
    """Number of rows appended to each item table, initially zero; other parameters share this
    number."""
    parameters: tuple[str, ...] = ()
    """Patterns of other parameters that also get rows; they disable training in native code."""


class Reserved(Model):
    """Wrapper that adds rows to the parameters of another model."""

    Config = ReservedConfig
    config: ReservedConfig

    def __init__(self, config: ReservedConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        self.base: Model = component_of(MODEL, Section.model_validate(config.base), schema)
        # item tables of the other model
        self.item_tables = self.base.item_tables  # type: ignore[misc]

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise global parameters `float32`, without the cohort dimension, from `generator` on
        the CPU. The base model's rows have the same values as without reserved rows."""
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
            if value.ndim and name not in self.item_tables and fits(name, self.config.parameters)
        ]
        share = -(-self.config.rows // max(len(others), 1))
        return {**dict.fromkeys(self.item_tables, self.config.rows), **dict.fromkeys(others, share)}

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`."""
        return self.base.predict(self._of_base(parameters), users, items, rows)

    def kernel(self) -> KernelModel | None:
        """Declaration for native code; None if native code does not support the model."""
        return self.base.kernel() if set(self.room) <= set(self.item_tables) else None

    def loss(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean loss over the last dimension, `[C, B] -> [C]`: cross-entropy (PrivRec eq. 2) or
        squared error."""
        return self.base.loss(predictions, labels, weights)

    def scores(self, parameters: Parameters, users: Users) -> Tensor:
        """Scores of the whole catalogue for each slice of the cohort dimension,
        `[C, num_items]`."""
        scores = self.base.scores(self._of_base(parameters), users)
        return scores[:, : self.schema.num_items]  # some models score every row of a table

    def _of_base(self, parameters: Parameters) -> Parameters:
        """Parameters `[C, ...]` without reserved rows, except item tables, which may be compact."""
        cut = {name: rows for name, rows in self.room.items() if name not in self.item_tables}
        return {
            name: value[:, : -cut[name]] if name in cut else value
            for name, value in parameters.items()
        }


# The step of audits: canaries upload fixed updates, all other clients run another step.
#
# Sampler, clip, sum and noise treat a canary like any other client, and these are what an audit
# tests. The other clients do exactly the same as without an audit, in blocks if their step supports
# it. Symmetric matrices are summed as whole squares, as their noise is measured in the
# antisymmetric part (`fedrec.attacks.canaries`).


class CanaryConfig(StepConfig):
    """Settings of a step with canaries; all further keys are settings of the other step."""

    model_config = ConfigDict(extra="allow")

    base: str = "sgd"
    """Name of the other step."""
    canaries: CanaryPlan
    """Canaries and their uploads."""

    @model_validator(mode="after")
    def _settings_of_the_other_step_are_right(self) -> Self:
        self.other()
        return self

    def other(self) -> StepConfig:
        """Settings of the other step.

        Raises:
            ExperimentError: a setting is unknown or wrong.
        """
        section = Section.model_validate(
            {**(self.model_extra or {}), "name": self.base, "epochs": self.epochs}
        )
        return component_settings(registry.STEP, section, at="step")

    @property
    def contributions(self) -> Contributions:
        """Kind of contributions of the other step, and so of the canaries."""
        return registry.resolve(registry.STEP, self.base).contributions

    @property
    def uploads(self) -> int | None:
        """Largest number of rounds per client, enforced by its device; None: unlimited."""
        return self.other().uploads


class Canary(PlantedStep):
    """Step that uploads fixed updates for the canaries; all other clients run another step.

    Raises:
        ExperimentError: a setting of the other step is wrong.
    """

    Config = CanaryConfig
    paper = "Steinke et al. 2023; Andrew et al. 2023"
    config: CanaryConfig

    def __init__(self, config: CanaryConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.base = registry.resolve(registry.STEP, config.base)(config.other(), model, device)
        self.private = self.base.private
        self._directions: Directions | None = None

    def is_planted(self, clients: np.ndarray) -> np.ndarray:
        """Which clients are canaries, `bool [clients]`."""
        return self.config.canaries.is_canary(clients)

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        client_params: Mapping[str, Tensor] | None = None,
    ) -> BlockUpdate:
        """Return the fixed updates of a block of canaries."""
        return one_by_one(parameters, block, client_params, self._fixed)

    def _fixed(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        plan = self.config.canaries
        delta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        if self._directions is None:
            shapes = {name: tuple(value.shape) for name, value in parameters.items()}
            self._directions = Directions(plan, getattr(self.model, "room", {}), shapes)
        for name, (positions, values) in self._directions.upload(data.client).items():
            flat = delta[name].view(-1)
            flat[torch.from_numpy(positions).to(flat.device)] = torch.from_numpy(values).to(flat)
        return Update(delta, plan.examples)

    def prepare(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        """Prepare the other step."""
        return self.base.prepare(parameters, generator)


# The canary clients of an audit in the data: another dataset with users without rows and features
# added, and items that no user has; and another split in which these users train.


class CanaryUsersConfig(ReaderConfig):
    """Settings of a dataset with canaries; `path` and `verify` are those of the other dataset,
    below `base`."""

    base: dict[str, Any]
    """The other dataset: its name and settings."""
    count: int = Field(ge=1)
    """Number of users added; their indices follow those of the others."""
    items: int = Field(default=0, ge=0)
    """Number of items added; their indices follow those of the others."""


class CanaryUsers(Reader):
    """Reader that adds users without rows to another dataset."""

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
            user_features=data.user_features.extended(np.full(users, -1)),
            item_ids=more_ids(data.item_ids, items, "canary"),
            item_features=data.item_features.extended(np.full(items, -1)),
        )

    def files(self) -> list[Path]:
        return self._base().files()

    def _base(self) -> Reader:
        section = Section.model_validate(self.config.base)
        settings = component_settings(DATASET, section, at="dataset.base")
        return resolve(DATASET, section.name)(section.name, settings)


class CanaryClientsConfig(Config):
    """Settings of a split with canaries."""

    base: dict[str, Any]
    """The other split: its name and settings."""
    count: int = Field(ge=1)
    """Number of canaries: the last users, who have no rows."""


class CanaryClients(Split):
    """Split that adds the last users, who have no rows, to another split's training clients."""

    Config = CanaryClientsConfig
    config: CanaryClientsConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """Return the dependence of the other split."""
        return component_of(
            registry.SPLIT, Section.model_validate(self.config.base), self.seed
        ).depends_on(adjacency)

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


# The audited experiment: the given one with canary clients.
#
# It has k more users in its dataset, who train in its split, k more rows in its model's item
# tables, and in each audited phase a step that sets the canaries' updates. Where clients send one
# number per item, the catalogue also has 2k items that no user has.


def kind_of(phase: Phase) -> Kind:
    """Kind of updates that clients send in a phase."""
    if contributions_of(phase.step) == "signed":
        return "signed"
    outer = getattr(resolve(STEP, str(phase.step["name"])), "outer", False)
    return "products" if outer else "rows"


def changes_for(experiment: Experiment, plans: Mapping[str, CanaryPlan]) -> dict[str, Any]:
    """Changed sections of an experiment with canary clients.

    Args:
        experiment: the experiment, resolved.
        plans: the canaries of each audited phase, equally many.
    """
    count = next(iter(plans.values())).count
    items = 2 * count if any(plan.kind == "rows" for plan in plans.values()) else 0
    phases = phases_of(experiment)

    def planted(step: Section) -> Section:
        """Add the canaries of its phase to a step; unchanged if the phase is not audited."""
        chosen = [
            plans[phase.name]
            for phase in phases
            if phase.name in plans and phase.has_step(step_table(step))
        ]
        if not chosen:
            return step
        plan = max(chosen, key=lambda plan: plan.magnitude)
        options = {"name": f"{__name__}:Canary", "base": step.name, "canaries": plan.table()}
        return Section.model_validate({**step.options, **options})

    def added(kind: str, name: str, **settings: Any) -> dict[str, Any]:
        base = step_table(getattr(experiment, kind))
        return {"name": f"{__name__}:{name}", "base": base, "count": count, **settings}

    changes = {
        "dataset": added("dataset", "CanaryUsers", items=items),
        "split": added("split", "CanaryClients"),
        "model": _with_rows(experiment, plans),
        "step": step_table(planted(experiment.step)),
    }
    settings = experiment.settings(STRATEGY)
    if isinstance(settings, Config):
        changed = _with_steps(settings, planted).table()
        changes["strategy"] = {"name": experiment.strategy.name, **changed}
    return changes


def _with_rows(experiment: Experiment, plans: Mapping[str, CanaryPlan]) -> dict[str, Any]:
    """Model with rows for the canaries; models of histories have no item tables. Products cover as
    many items as without canaries."""
    base = step_table(experiment.model)
    model = resolve(MODEL, experiment.model.name)
    if issubclass(model, ProductsModel):
        most = Population.of(experiment).interactions.num_items
        base["items"] = min(component_settings(MODEL, experiment.model).items, most)
    if issubclass(model, HistoryModel):
        return base
    signed = [plan for plan in plans.values() if plan.kind == "signed"]
    patterns = sorted({pattern for plan in signed for pattern in plan.parameters})
    count = next(iter(plans.values())).count
    name = f"{__name__}:Reserved"
    return {"name": name, "base": base, "rows": count, "parameters": patterns}


def _with_steps(settings: Config, planted: Callable[[Section], Section]) -> Config:
    """Settings of a strategy with other steps, also in nested strategies."""
    changes: dict[str, Any] = {}
    for name, kind, value in fields_of(settings):
        if kind is STEP:
            changes[name] = planted(value)
        elif kind is STRATEGY:
            inner = component_settings(STRATEGY, value)
            if isinstance(inner, Config):
                table = _with_steps(inner, planted).table()
                changes[name] = Section.model_validate({"name": value.name, **table})
        elif isinstance(value, Config) and not isinstance(value, Section):
            changes[name] = _with_steps(value, planted)
    return settings.model_copy(update=changes)
