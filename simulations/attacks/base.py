# SPDX-License-Identifier: Apache-2.0
"""The interface of attacks: required runs, the attacker's view of them, and the outcome.

`fedrec attack NAME EXPERIMENT` trains these runs, or reuses them, and writes the outcome.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from fedrec.attacks.attribute import Figure, Success, measure
from fedrec.components.registry import ATTACK
from fedrec.components.sections import Section, component_errors, component_of, refuse_wrong
from fedrec.config import Config
from fedrec.data.population import POPULATIONS, Population
from fedrec.experiment.phases import step_table
from fedrec.experiment.schema import Experiment, load
from fedrec.rng import seed_sequence
from fedrec.runtime.files import finite, write_json
from server.callbacks import Callback
from simulations.attacks.members import Members, half_members
from simulations.attacks.system import TrainedSystem
from simulations.studies.runs import run_once

TARGET = "target"
"""Name of the attacked run."""
QUICK = {"every": 0, "users": 1, "final-users": 1, "fine-tune": {"epochs": 0}}
"""Minimal evaluation settings, for runs whose metrics are not needed."""


@dataclass(frozen=True, eq=False)
class AttackRun:
    """A run for an attack: the attacked experiment with changes.

    Attributes:
        members: `bool [users]`, mask of the attacked experiment's training users that train; None:
            all.
        seed: seed of the run; None: that of the experiment.
        changes: whole sections of the experiment, by name, such as another `step`.
        evaluation: changed keys of its evaluation (kebab-case); baselines are always left out.
        callbacks: called on each event of the run.
    """

    members: np.ndarray | None = None
    seed: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=lambda: QUICK)
    callbacks: Sequence[Callback] = ()


@dataclass(frozen=True, eq=False)
class Attacked:
    """The attacked experiment, and the attacker's view of it.

    Attributes:
        experiment: the attacked experiment, resolved.
        population: its data; the partition before members are drawn, so that it does not reveal
            membership.
        users: `int64 [users]`, ascending: the users who are attacked, by default all that train.
        folder: folder of the runs and of files of the attack.
        systems: the trained runs by name; empty before they are trained.
    """

    experiment: Experiment
    population: Population
    users: np.ndarray
    folder: Path
    systems: Mapping[str, TrainedSystem] = field(default_factory=dict)

    @property
    def target(self) -> TrainedSystem:
        """The attacked run."""
        return self.systems[TARGET]

    def seed_of(self, name: str, number: int) -> int:
        """Derive a seed for one of several runs."""
        words = seed_sequence(self.experiment.seed, name, number).generate_state(1, np.uint64)
        return int(words[0] >> np.uint64(1))


@dataclass(frozen=True, eq=False)
class AttackOutcome:
    """The outcome of an attack.

    Attributes:
        figures: measured figures, such as a `fedrec.attacks.attribute.Success`.
        table: plain values, saved as JSON.
        rows: a table to print; the first row has the column titles.
        lines: text to print below the table.
        verdict: PASS, WARN or FAIL for attacks that test a claim; with FAIL the command's exit
            status is 1.
        reasons: reasons for the verdict.
    """

    figures: Any
    table: Mapping[str, Any]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str] = ()
    verdict: str = ""
    reasons: Sequence[str] = ()


class Attack(ABC):
    """Measures what training reveals.

    A built-in has a `name` and lives in `simulations/attacks/`, its configuration class
    above it; every setting is an option of the command. Its outcome depends only on its
    observations, settings and seed.

    Args:
        config: settings of the attack.
        seed: seed of the experiment; random decisions come from `fedrec.rng.stream(seed, NAME)`.

    Attributes:
        file: name of the saved outcome.
    """

    Config: ClassVar[type[Config]] = Config
    file: ClassVar[str] = "attack.json"

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self.seed = seed

    @abstractmethod
    def trainings(self, attacked: Attacked) -> Mapping[str, AttackRun]:
        """Return the required runs, by folder name; none if the attack uses data only."""

    @abstractmethod
    def outcome(self, attacked: Attacked) -> AttackOutcome:
        """Attack the trained `attacked.systems`."""


class MembershipConfig(Config):
    """Settings of every membership attack."""

    epsilon: float | None = Field(default=None, ge=0)
    """Claimed epsilon of the attacked system, to print the implied bounds."""
    delta: float = Field(default=1e-5, ge=0, le=1)
    """Delta of the claimed epsilon."""


class MembershipAttack(Attack):
    """Base of membership attacks, which tell training users of a system (members) from others.

    A subclass has its settings derived from `MembershipConfig`, and `suspicion`. The target is
    trained by half of the users, and all users are attacked, unless `trainings` or `victims`
    differ.

    Attributes:
        details: further numbers for the saved outcome.
    """

    Config = MembershipConfig
    config: MembershipConfig

    def __init__(self, config: MembershipConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.details: dict[str, Any] = {}

    @abstractmethod
    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """Score of each user of `attacked.users`, `float64 [users]`: the higher, the more likely it
        trained `attacked.target`."""

    def threshold(self, suspicion: np.ndarray) -> float:
        """Threshold of the scores `float64 [users]` above which a user counts as a member; by
        default the median, because about half of the users are members."""
        return float(np.median(suspicion))

    def victims(self, attacked: Attacked) -> np.ndarray:
        """Attacked users among `attacked.users`, `int64 [n]`, ascending."""
        return attacked.users

    def trainings(self, attacked: Attacked) -> Mapping[str, AttackRun]:
        """Return the required runs, by folder name."""
        half = half_members(len(attacked.users), self.seed)
        return {TARGET: AttackRun(half, evaluation={"every": 0})}

    def outcome(self, attacked: Attacked) -> AttackOutcome:
        """Attack the target.

        Raises:
            ComponentError: `suspicion` is not one finite number per user.
        """
        users = self.victims(attacked)
        suspicion = self._checked(self.suspicion(replace(attacked, users=users)), len(users))
        member = np.isin(users, attacked.target.members)
        success = measure(suspicion, member, threshold=self.threshold(suspicion))
        claimed = self.config.epsilon
        ceilings = {} if claimed is None else success.ceilings(claimed, self.config.delta)
        table = {"success": success.table(), **self.details, "ceilings": ceilings}
        line = f"{success.members} members, {success.others} others."
        return AttackOutcome(success, table, figure_rows(_figures(success), ceilings), [line])

    def _checked(self, suspicion: Any, users: int) -> np.ndarray:
        numbers = isinstance(suspicion, np.ndarray) and suspicion.shape == (users,)
        if not numbers or not np.isfinite(suspicion).all():
            shape = f"{type(suspicion).__name__} {list(getattr(suspicion, 'shape', ()))}"
            refuse_wrong(
                "attack",
                self,
                "in suspicion",
                expected=f"{users} finite numbers",
                got="NaN or infinity" if numbers else shape,
            )
        return suspicion


def _figures(success: Success) -> list[tuple[str, Figure, float, str]]:
    caught = f"members found at {success.wanted:.0%} false alarms"
    return [
        ("accuracy", success.accuracy, success.majority, ""),
        ("balanced accuracy", success.balanced_accuracy, 0.5, "balanced_accuracy"),
        ("AUC", success.auc, 0.5, ""),
        (caught, success.members_found, success.false_alarms, "found"),
    ]


def figure_rows(
    rows: Iterable[tuple[str, Figure, float, str]], ceilings: Mapping[str, float]
) -> list[list[str]]:
    """Format a table of figures to print.

    Args:
        rows: title, figure, value by chance and key in `ceilings` of each figure.
        ceilings: largest values under differential privacy.
    """
    more = ["DP ceiling"] if ceilings else []
    printed = [["figure", "value", "95 % interval", "chance", *more]]
    for words, figure, chance, key in rows:
        interval = f"{figure.low:.3f} to {figure.high:.3f}"
        ceiling = [f"{ceilings[key]:.3f}" if key in ceilings else "-"] if ceilings else []
        printed.append([words, f"{figure.value:.3f}", interval, f"{chance:.3f}", *ceiling])
    return printed


# Running an attack: train the required runs, unless they exist, and save the outcome.


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
        ExperimentError: the attack is unknown, a setting is wrong, or the experiment does not
            support the attack.
        ComponentError: the attack failed, or its result has the wrong form.
        RunError: the folder contains a run of another experiment.
        FedrecError: see `simulations.runner.run`.
    """
    named = Section.model_validate(chosen)
    attack: Attack = component_of(ATTACK, named, experiment.seed)
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
        outcome = attack.outcome(replace(attacked, systems=systems))
    recommends = {"recommends": systems[TARGET].metrics} if TARGET in systems else {}
    options = attack.config.model_dump(mode="json")
    table = finite({"attack": named.name, "options": options, **outcome.table, **recommends})
    write_json(output / attack.file, table)
    return replace(outcome, table=table)


def _derived(experiment: Experiment, name: str, training: AttackRun) -> Experiment:
    """Derive the experiment of a run from the attacked one."""
    table = experiment.table()
    split = {}
    if training.members is not None:
        base = step_table(experiment.split)
        split = {"split": Members.section(base, experiment.seed_of_split, training.members)}
    changed = {
        "name": f"{experiment.name}-{name}",
        "seed": experiment.seed if training.seed is None else training.seed,
        "evaluation": {**table["evaluation"], "baselines": [], **training.evaluation},
    }
    return load({**table, **changed, **split, **training.changes})
