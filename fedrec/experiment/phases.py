# SPDX-License-Identifier: Apache-2.0
"""Phases of an experiment's training, with their rounds and steps. Server and nodes derive them
independently from the experiment, so that a node need not trust the server about the step and the
protection of a round.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedrec.components import registry
from fedrec.components.sections import Section, component_settings
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.sampling import Contributions

MAIN = "main"


@dataclass(frozen=True)
class Phase:
    """Phase of training.

    Attributes:
        name: its name, as in `privacy.phases`, in the ledger and in the report.
        step: name and settings of the local step.
        last: number of its last round; None: until the end.
        sampler: sampler of its cohorts; None: the experiment's sampler.
    """

    name: str
    step: Mapping[str, Any]
    last: int | None = None
    sampler: Section | None = None

    def has_step(self, step: Mapping[str, Any]) -> bool:
        """True if the phase's step has exactly these settings."""
        return _text(self.step) == _text(step)


def step_table(section: Section) -> dict[str, Any]:
    """Name and settings of a step, as in a training order."""
    return {"name": section.name, **section.options}


def contributions_of(step: Mapping[str, Any]) -> Contributions:
    """Kind of contributions of a step, by its name and settings; `signed` unless the step declares
    otherwise. Settings of a step that wraps another declare the kind of the wrapped step."""
    section = Section.model_validate(step)
    declared: Contributions = getattr(
        registry.resolve(registry.STEP, section.name), "contributions", "signed"
    )
    return getattr(component_settings(registry.STEP, section), "contributions", declared)


def symmetric_of(experiment: Experiment, step: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Names of parameters that a step updates symmetrically, so that only one half is sent; none
    under `[compression]`, which rounds the halves separately.

    Args:
        experiment: the experiment.
        step: name and settings of a step; None: the experiment's own.
    """
    if experiment.compression is not None:
        return ()
    name = experiment.step.name if step is None else step["name"]
    return getattr(registry.resolve(registry.STEP, name), "symmetric", ())


def phases_of(experiment: Experiment, *, nested: bool = True) -> tuple[Phase, ...]:
    """Phases of a resolved experiment, in order.

    Args:
        experiment: the experiment.
        nested: whether the strategy's phases are included; otherwise there is one phase, with the
            experiment's step.
    """
    step = step_table(experiment.step)
    if nested:
        strategy = registry.resolve(registry.STRATEGY, experiment.strategy.name)
        if hasattr(strategy, "schedule"):  # missing in Flower's strategies
            return tuple(
                strategy.schedule(component_settings(registry.STRATEGY, experiment.strategy), step)
            )
    return (Phase(MAIN, step),)


def phase_at(phases: Sequence[Phase], round_number: int) -> Phase:
    """Return the phase of a round."""
    return next(phase for phase in phases if phase.last is None or round_number <= phase.last)


def last_phase(experiment: Experiment) -> str:
    """Name of the phase of the experiment's last round."""
    return phase_at(phases_of(experiment), experiment.rounds).name


def rounds_before_last_phase(experiment: Experiment) -> int:
    """Number of rounds of all phases but the last one."""
    ends = [phase.last for phase in phases_of(experiment) if phase.last is not None]
    return max(ends, default=0)


def _text(step: Mapping[str, Any]) -> str:
    return json.dumps(step, sort_keys=True)
