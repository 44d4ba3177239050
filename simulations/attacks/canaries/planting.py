# SPDX-License-Identifier: Apache-2.0
"""The audited experiment: the given one with canary clients.

It has k more users in its dataset, who train in its split, k more rows in its model's item tables,
and in each audited phase a step that sets the canaries' updates. Where clients send one number per
item, the catalogue also has 2k items that nobody has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedrec.attacks.audit.canaries import CanaryPlan, Kind
from fedrec.components.registry import MODEL, STEP, STRATEGY, resolve
from fedrec.components.registry import Kind as Component
from fedrec.config import Config
from fedrec.data.population import Population
from fedrec.experiment.phases import Phase, contributions_of, phases_of, step_table
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import Section, component_settings
from fedrec.models.base import HistoryModel, ProductsModel
from simulations.attacks.system import section

_HERE = __name__.rpartition(".")[0]


def kind_of(phase: Phase) -> Kind:
    """What clients send in a phase."""
    if contributions_of(phase.step) == "signed":
        return "signed"
    outer = getattr(resolve(STEP, str(phase.step["name"])), "outer", False)
    return "products" if outer else "rows"


def changes_for(experiment: Experiment, plans: Mapping[str, CanaryPlan]) -> dict[str, Any]:
    """The sections of an experiment with canary clients that differ.

    Args:
        experiment: the experiment, resolved.
        plans: the canaries of each audited phase, as many in each.
    """
    count = next(iter(plans.values())).count
    items = 2 * count if any(plan.kind == "rows" for plan in plans.values()) else 0
    phases = phases_of(experiment)

    def planted(step: Section) -> Section:
        """A step with the canaries of its phase; as it is if that is not audited."""
        own = [
            plans[phase.name]
            for phase in phases
            if phase.name in plans and phase.has_step(step_table(step))
        ]
        if not own:
            return step
        plan = max(own, key=lambda one: one.magnitude)
        options = {"name": f"{_HERE}.step:Canary", "base": step.name, "canaries": plan.table()}
        return Section.model_validate({**step.options, **options})

    def added(kind: str, name: str, **settings: Any) -> dict[str, Any]:
        base = section(experiment, kind)
        return {"name": f"{_HERE}.population:{name}", "base": base, "count": count, **settings}

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
    """The model with rows for the canaries; those of histories have no item tables. Products are
    about as many items as without canaries."""
    base = section(experiment, "model")
    model = resolve(MODEL, experiment.model.name)
    if issubclass(model, ProductsModel):
        most = Population.of(experiment).interactions.num_items
        base["items"] = min(component_settings(MODEL, experiment.model).items, most)
    if issubclass(model, HistoryModel):
        return base
    signed = [plan for plan in plans.values() if plan.kind == "signed"]
    patterns = sorted({pattern for plan in signed for pattern in plan.parameters})
    count = next(iter(plans.values())).count
    name = f"{_HERE}.reserved:Reserved"
    return {"name": name, "base": base, "rows": count, "parameters": patterns}


def _with_steps(settings: Config, planted: Callable[[Section], Section]) -> Config:
    """Settings of a strategy with other steps, those of strategies within it, too."""
    changes: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        kind = next((kind for kind in field.metadata if isinstance(kind, Component)), None)
        if kind is STEP and isinstance(value, Section):
            changes[name] = planted(value)
        elif kind is STRATEGY and isinstance(value, Section):
            inner = component_settings(STRATEGY, value)
            if isinstance(inner, Config):
                table = _with_steps(inner, planted).table()
                changes[name] = Section.model_validate({"name": value.name, **table})
        elif isinstance(value, Config) and not isinstance(value, Section):
            changes[name] = _with_steps(value, planted)
    return settings.model_copy(update=changes)
