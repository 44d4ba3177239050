# SPDX-License-Identifier: Apache-2.0
"""Attacks an experiment: trains the runs that an attack needs, unless they are there, and saves
what the attack found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedrec.components.errors import component_errors
from fedrec.components.registry import ATTACK
from fedrec.data.cache import POPULATIONS
from fedrec.experiment.loading import load
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import Section, component_of
from fedrec.runtime.atomic_files import write_atomically
from fedrec.runtime.strict_json import finite
from server.callbacks.base import Callback
from simulations.attacks.base import TARGET, Attack, Attacked, AttackOutcome, AttackRun
from simulations.attacks.members import Members
from simulations.attacks.system import TrainedSystem, section
from simulations.study.runs import run_once


def run_attack(
    experiment: Experiment,
    chosen: Mapping[str, Any],
    output: Path,
    callbacks: Sequence[Callback] = (),
) -> AttackOutcome:
    """Attack an experiment.

    Args:
        experiment: the attacked experiment, resolved.
        chosen: name and settings of the attack, as in TOML.
        output: folder of the runs and of the outcome; finished runs in it are reused, interrupted
            ones continued.
        callbacks: called on each event of the runs.

    Raises:
        ExperimentError: the attack is unknown, one of its settings is wrong, or the experiment
            cannot be attacked in this way.
        ComponentError: the attack failed, or its answer is of the wrong form.
        RunError: the folder holds a run of another experiment.
        FedrecError: see `simulations.runner.run`.
    """
    given = Section.model_validate(chosen)
    attack: Attack = component_of(ATTACK, given, experiment.seed)
    POPULATIONS.renew(experiment)
    population = POPULATIONS.population(experiment)
    users = population.partition.training_clients
    attacked = Attacked(experiment, population, users, output)
    with component_errors(ATTACK.name, attack, "in trainings"):
        trainings = attack.trainings(attacked)
    systems = {}
    for name, training in trainings.items():
        watching = [*training.callbacks, *callbacks]
        run = run_once(_derived(experiment, name, training), output / name, watching)
        members = users if training.members is None else users[training.members]
        systems[name] = TrainedSystem(experiment, run, members)
    with component_errors(ATTACK.name, attack, "in its outcome"):
        found = attack.outcome(replace(attacked, systems=systems))
    recommends = {"recommends": systems[TARGET].metrics} if TARGET in systems else {}
    options = attack.config.model_dump(mode="json")
    table = finite({"attack": given.name, "options": options, **found.table, **recommends})
    write_atomically(output / attack.file, json.dumps(table, indent=2) + "\n")
    return replace(found, table=table)


def _derived(experiment: Experiment, name: str, training: AttackRun) -> Experiment:
    """An experiment like the attacked one."""
    table = experiment.table()
    split = {}
    if training.members is not None:
        base = section(experiment, "split")
        split = {"split": Members.section(base, experiment.seed_of_split, training.members)}
    own = {
        "name": f"{experiment.name}-{name}",
        "seed": experiment.seed if training.seed is None else training.seed,
        "evaluation": {**table["evaluation"], "baselines": [], **training.evaluation},
    }
    return load({**table, **own, **split, **training.changes})
