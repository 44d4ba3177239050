# SPDX-License-Identifier: Apache-2.0
"""Attacks: their interface (required runs, the attacker's view of them, and the outcome), and the
inference of membership and of attributes.

`fedrec attack NAME EXPERIMENT` trains these runs, or reuses them, and writes the outcome.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedrec.components.registry import ATTACK
from fedrec.components.sections import Section, component_errors, component_of, refuse_wrong
from fedrec.config import Config, did_you_mean
from fedrec.data.population import POPULATIONS, Population
from fedrec.errors import ExperimentError
from fedrec.experiment.phases import step_table
from fedrec.experiment.schema import Experiment, load
from fedrec.rng import seed_sequence
from fedrec.runtime.files import finite, write_json
from server.callbacks import Callback
from simulations.attacks.inference import (
    Describer,
    Figure,
    Inference,
    Scaling,
    Success,
    fit_signals,
    forest_scores,
    infer_attribute,
    lira_scores,
    measure,
    one_hot,
)
from simulations.attacks.systems import (
    TrainedSystem,
    TrainingClients,
    bit_mask,
    half_members,
    half_memberships,
    shadow_parts,
)
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
        figures: measured figures, such as a `simulations.attacks.inference.Success`.
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
    trained by half of the users, unless `trainings` differs, and all users are attacked.
    """

    Config = MembershipConfig
    config: MembershipConfig

    @abstractmethod
    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """Score of each user of `attacked.users`, `float64 [users]`: the higher, the more likely it
        trained `attacked.target`."""

    def threshold(self, suspicion: np.ndarray) -> float:
        """Threshold of the scores `float64 [users]` above which a user counts as a member; by
        default the median, because about half of the users are members."""
        return float(np.median(suspicion))

    def trainings(self, attacked: Attacked) -> Mapping[str, AttackRun]:
        """Return the required runs, by folder name."""
        half = half_members(len(attacked.users), self.seed)
        return {TARGET: AttackRun(half, evaluation={"every": 0})}

    def outcome(self, attacked: Attacked) -> AttackOutcome:
        """Attack the target.

        Raises:
            ComponentError: `suspicion` is not one finite number per user.
        """
        suspicion = self._checked(self.suspicion(attacked), len(attacked.users))
        member = np.isin(attacked.users, attacked.target.members)
        success = measure(suspicion, member, threshold=self.threshold(suspicion))
        claimed = self.config.epsilon
        ceilings = {} if claimed is None else success.ceilings(claimed, self.config.delta)
        table = {"success": success.table(), "ceilings": ceilings}
        line = f"{success.members} members, {success.others} others."
        return AttackOutcome(success, table, _figure_rows(_figures(success), ceilings), [line])

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


def _figure_rows(
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
    recommends = {}
    if TARGET in systems:
        recommends = {"recommends": dict(systems[TARGET].run.read_result().metrics)}
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
        mask = bit_mask(training.members)
        section = TrainingClients.section(base, seed=experiment.seed_of_split, members=mask)
        split = {"split": section}
    changed = {
        "name": f"{experiment.name}-{name}",
        "seed": experiment.seed if training.seed is None else training.seed,
        "evaluation": {**table["evaluation"], "baselines": [], **training.evaluation},
    }
    return load({**table, **changed, **split, **training.changes})


# Inference from federations: membership by PrivRec's attack, by likelihood ratios and by fit, and
# attributes of users.

# PrivRec's membership attack (section 4.6): a shadow and a target federation, lists, a forest;
# `simulations.attacks.inference` has the forest, and lists what the paper leaves open.

_SHADOW = "shadow"
_LENGTH = 10
"""Length of recommendation lists."""


class PrivRecAttackConfig(MembershipConfig):
    """Settings of PrivRec's membership attack."""

    shadow_users: int = Field(default=1000, ge=1)
    """Number of shadow users, with data known to the attacker."""
    trees: int = Field(default=100, ge=1)
    """Number of trees in the random forest."""
    judged: int = Field(default=200, ge=0)
    """Number of random test users on whom the target's recommendations are evaluated; 0: all. With
    fine-tuning, evaluating all takes longer than the attack itself."""


class PrivRecAttack(MembershipAttack):
    """PrivRec's membership attack: shadow system, top-10 lists, random forest."""

    name = "membership"
    Config = PrivRecAttackConfig
    paper = "PrivRec (Wang et al. 2021), section 4.6"
    config: PrivRecAttackConfig

    def trainings(self, attacked: Attacked) -> Mapping[str, AttackRun]:
        """Runs for the attack: the shadow system and the target.

        Raises:
            ExperimentError: there are too few users.
        """
        used, _, members, _ = self._parts(attacked)
        judged = {"final-users": self.config.judged} if self.config.judged else {}
        users = attacked.users
        return {
            _SHADOW: AttackRun(np.isin(users, used), attacked.seed_of("attack-run", 0)),
            TARGET: AttackRun(np.isin(users, members), evaluation={"every": 0, **judged}),
        }

    def outcome(self, attacked: Attacked) -> AttackOutcome:
        """Attack all users but the shadow users."""
        users = np.sort(np.concatenate(self._parts(attacked)[2:]))
        return super().outcome(replace(attacked, users=users))

    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """Probability of "member" by the forest, `float64 [users]`."""
        population = attacked.population
        shadow = attacked.systems[_SHADOW]
        known = np.setdiff1d(population.partition.training_clients, attacked.users)
        items = population.rows(known, positive=True).items
        data = population.interactions
        popularity = np.bincount(items, minlength=data.num_items)
        describer = Describer(data.user_features, data.item_features, popularity)
        lists = attacked.target.lists(attacked.users, _LENGTH)
        return forest_scores(
            describer.describe(known, shadow.lists(known, _LENGTH)),
            np.isin(known, shadow.members),
            describer.describe(attacked.users, lists),
            seed=self.seed,
            trees=self.config.trees,
        )

    def threshold(self, suspicion: np.ndarray) -> float:
        """Threshold 1/2 of the forest's probability."""
        return 0.5

    def _parts(self, attacked: Attacked) -> list[np.ndarray]:
        return shadow_parts(attacked.users, self.config.shadow_users, self.seed)


# The attack by fit (Yeom et al. 2018, section 3): a user whom the system fits well is called a
# member.
#
# Where this differs from the paper: it compares the loss of one example with the mean training
# loss; here a user is the unit, its fit is a mean over its rows (`simulations.attacks.inference`),
# and the median of all users replaces the mean loss.


class Fit(MembershipAttack):
    """Membership attack by fit: suspects the users with the best fit, without shadow systems."""

    name = "fit"
    paper = "Yeom et al. 2018, section 3"

    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """Fit of the target to each user, `float64 [users]`."""
        return self.signals(attacked, attacked.target)

    def signals(self, attacked: Attacked, system: TrainedSystem) -> np.ndarray:
        """Fit of a system to each user, `float64 [users]`."""
        blocks = system.scores(attacked.users)
        return np.concatenate(
            [fit_signals(scores, attacked.population, part) for part, scores in blocks]
        )


# The likelihood-ratio attack (Carlini et al. 2022): shadow federations on random halves of the
# users, and a target; `simulations.attacks.inference` has the statistic.


class LiraConfig(MembershipConfig):
    """Settings of the likelihood-ratio attack."""

    shadows: int = Field(default=16, ge=4, multiple_of=2)
    """Number of shadow systems; every user trains half of them, and both halves need a mean and a
    variance."""


class Lira(Fit):
    """Likelihood-ratio attack with shadow federations."""

    name = "lira"
    Config = LiraConfig
    paper = "Carlini et al. 2022"
    config: LiraConfig

    def trainings(self, attacked: Attacked) -> Mapping[str, AttackRun]:
        """Runs for the attack: the target, and shadow systems of half of the users each."""
        masks = half_memberships(len(attacked.users), self.config.shadows, self.seed)
        shadows = {
            f"shadow-{number:03d}": AttackRun(mask, attacked.seed_of("attack-run", number))
            for number, mask in enumerate(masks, 1)
        }
        return {**super().trainings(attacked), **shadows}

    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """Scores `float64 [users]`, see `lira_scores`."""
        shadows = [system for name, system in attacked.systems.items() if name != TARGET]
        signals = np.stack([self.signals(attacked, shadow) for shadow in shadows])
        members = np.stack([np.isin(attacked.users, shadow.members) for shadow in shadows])
        return lira_scores(self.signals(attacked, attacked.target), signals, members)

    def threshold(self, suspicion: np.ndarray) -> float:
        """Threshold of the log ratio: 0, a ratio of 1."""
        return 0.0


# Attribute inference: from profiles, from recommendation lists without items of the user's real
# training rows, or from clients' updates; `simulations.attacks.inference` has the attacker.


class AttributeConfig(Config):
    """Settings of attribute inference."""

    attribute: str = "gender"
    """User feature to infer."""
    source: Literal["profiles", "recommendations", "updates"] = "profiles"
    """Data that the attacker sees. `profiles`: the items that each device learns from (perturbed,
    where the experiment perturbs them); `recommendations`: top lists of the trained system after
    each user's own fine-tuning; `updates`: the upload of each client in the round after the
    last."""
    folds: int = Field(default=5, ge=2)
    """Number of cross-validation folds over users."""


class Attribute(Attack):
    """Inference of a user attribute, such as gender, from profiles, recommendations or updates."""

    name = "attribute"
    Config = AttributeConfig
    config: AttributeConfig

    def trainings(self, attacked: Attacked) -> Mapping[str, AttackRun]:
        """Runs for the attack: the attacked experiment itself; none for profiles.

        Raises:
            ExperimentError: the attribute is unknown, or has several values per user.
        """
        self._labels(attacked.population)
        needed = self.config.source != "profiles"
        return {TARGET: AttackRun(evaluation={"every": 0})} if needed else {}

    def outcome(self, attacked: Attacked) -> AttackOutcome:
        """Infer the attribute of the training clients with a known one.

        Raises:
            ExperimentError: a class has too few users.
        """
        users, labels, categories = self._labels(attacked.population)
        scaling: Scaling = "columns" if self.config.source == "updates" else "rows"
        inference = infer_attribute(
            self._described(attacked, users),
            labels,
            scaling=scaling,
            folds=self.config.folds,
            seed=self.seed,
        )
        sizes = ", ".join(
            f"{n} {label}" for n, label in zip(inference.classes, categories, strict=True)
        )
        folds = f"{min(inference.folds):.3f} to {max(inference.folds):.3f}"
        line = f"{inference.users} users ({sizes}); balanced accuracy in the folds {folds}."
        table = {"categories": categories, "success": inference.table()}
        return AttackOutcome(inference, table, _rows(inference), [line])

    def _described(self, attacked: Attacked, users: np.ndarray) -> np.ndarray:
        """Descriptions of users as the attacker sees them, `float32 [users, columns]`."""
        source = self.config.source
        items = attacked.population.interactions.num_items
        if source == "updates":
            return np.stack(list(attacked.target.updates(users)))
        if source == "recommendations":
            return one_hot(attacked.target.lists(users, _LENGTH, as_shown=True), items)
        profiles = np.zeros((len(users), items), dtype=np.float32)
        for row, user in zip(profiles, users.tolist(), strict=True):
            row[attacked.population.client(user).items] = 1.0
        return profiles

    def _labels(self, population: Population) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
        """Training clients with a known attribute, class codes from 0, and class labels."""
        features = population.interactions.user_features
        name = self.config.attribute
        known = features.names
        if name not in known or features[name].width != 1:
            raise ExperimentError(
                f"attribute {name!r} cannot be inferred",
                expected=f"a feature with one category per user, of {', '.join(known) or 'none'}",
                fix=did_you_mean(name, known) if known else "choose another dataset",
            )
        users = population.partition.training_clients
        codes = features[name].padded()[users, 0]
        present, labels = np.unique(codes[codes >= 0], return_inverse=True)
        categories = tuple(features[name].categories[code] for code in present)
        return users[codes >= 0], labels.astype(np.int64), categories


def _rows(inference: Inference) -> list[list[str]]:
    figures = [
        ("balanced accuracy", inference.balanced_accuracy, inference.chance, ""),
        ("accuracy", inference.accuracy, inference.majority, ""),
    ]
    auc = [] if inference.auc is None else [["AUC", f"{inference.auc:.3f}", "-", "0.500"]]
    return [*_figure_rows(figures, {}), *auc]
