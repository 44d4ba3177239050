# SPDX-License-Identifier: Apache-2.0
"""A membership attack by name, built-in or from a plug-in: train an experiment on half of its users
and attack it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedrec.attacks.base import Attack, Attacked
from fedrec.attacks.success import Success, measure
from fedrec.components.errors import component_errors, refuse_wrong
from fedrec.components.registry import ATTACK, resolve
from fedrec.data.memberships import half_members
from fedrec.data.population import Population
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import Section, component_settings
from server.callbacks.base import Callback
from simulations.attacks.federations import derived, parameters_of, scores_of, section
from simulations.study.runs import run_once


@dataclass(frozen=True)
class NamedAttack:
    """Results of the attack.

    Attributes:
        name: name of the attack.
        settings: its settings.
        fine_tune: whether each user's scores come after fine-tuning on its own data.
        success: on members and others of the attacked system.
        recommends: metrics of the attacked system.
    """

    name: str
    settings: dict[str, Any]
    fine_tune: bool
    success: Success
    recommends: dict[str, float]

    def table(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "attack": self.name, "success": self.success.table()}


def attack_by_name(
    experiment: Experiment,
    chosen: Section,
    output: Path,
    callbacks: Sequence[Callback] = (),
    *,
    fine_tune: bool = False,
) -> NamedAttack:
    """Train the system on half of its users (unless it is in `output` already) and attack it.

    Raises:
        ExperimentError: the attack or one of its settings is unknown or wrong.
        ComponentError: the attack failed, or its answer is not one number per user.
        FedrecError: see `simulations.runner.run`.
    """
    attack_class = resolve(ATTACK, chosen.name)
    settings = component_settings(ATTACK, chosen)
    with component_errors(ATTACK.name, attack_class, "when it was made"):
        attack: Attack = attack_class(settings, experiment.seed)
    population = Population.of(experiment)
    users = population.partition.training_clients
    half = {"seed": experiment.seed, "draw": "half", "runs": 4, "run": 0}
    split = {"split": {"name": "members", "base": section(experiment, "split"), **half}}
    run = run_once(
        derived(experiment, "target", experiment.seed, split, every=0), output / "target", callbacks
    )
    parameters = parameters_of(run)
    for value in parameters.values():
        value.setflags(write=False)
    scores = partial(
        scores_of, experiment, {n: v.copy() for n, v in parameters.items()}, fine_tune=fine_tune
    )
    suspicion = _suspicion(attack, Attacked(users, population, parameters, scores))
    member = half_members(len(users), experiment.seed)
    success = measure(suspicion, member, threshold=attack.threshold(suspicion))
    return NamedAttack(
        chosen.name, settings.table(), fine_tune, success, dict(run.read_result().metrics)
    )


def _suspicion(attack: Attack, attacked: Attacked) -> np.ndarray:
    with component_errors(ATTACK.name, attack, "in suspicion"):
        found = attack.suspicion(attacked)
    users = len(attacked.users)
    if not isinstance(found, np.ndarray) or found.shape != (users,) or not np.isfinite(found).all():
        numbers = isinstance(found, np.ndarray) and found.shape == (users,)
        got = (
            "NaN or infinity"
            if numbers
            else f"{type(found).__name__} {list(getattr(found, 'shape', ()))}"
        )
        refuse_wrong(
            ATTACK.name, attack, "in suspicion", expected=f"{users} finite numbers", got=got
        )
    return found
