# SPDX-License-Identifier: Apache-2.0
"""Inference from federations: membership by PrivRec's attack, by likelihood ratios and by fit, and
attributes of users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from fedrec.attacks.attribute import Inference, Scaling, infer_attribute
from fedrec.attacks.membership import (
    Describer,
    fit_signals,
    forest_scores,
    lira_scores,
    one_hot,
    train_forest,
)
from fedrec.config import Config, did_you_mean
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.runtime.files import open_atomically
from simulations.attacks.base import (
    TARGET,
    Attack,
    Attacked,
    AttackOutcome,
    AttackRun,
    MembershipAttack,
    MembershipConfig,
    figure_rows,
)
from simulations.attacks.members import half_memberships, shadow_parts
from simulations.attacks.system import TrainedSystem

# PrivRec's membership attack (section 4.6): a shadow and a target federation, lists, a forest;
# `fedrec.attacks.membership` has the forest, and lists what the paper leaves open.

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

    def victims(self, attacked: Attacked) -> np.ndarray:
        """Attacked users: all but the shadow users, `int64 [n]`."""
        return np.sort(np.concatenate(self._parts(attacked)[2:]))

    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """Probability of "member" by the forest, `float64 [users]`."""
        population = attacked.population
        shadow = attacked.systems[_SHADOW]
        known = np.setdiff1d(population.partition.training_clients, attacked.users)
        items = population.rows(known, positive=True).items
        data = population.interactions
        popularity = np.bincount(items, minlength=data.num_items)
        describer = Describer(data.user_features, data.item_features, popularity)
        forest = train_forest(
            describer.describe(known, shadow.lists(known, _LENGTH)),
            np.isin(known, shadow.members),
            seed=self.seed,
            trees=self.config.trees,
        )
        lists = attacked.target.lists(attacked.users, _LENGTH)
        there = describer.describe(attacked.users, lists)
        # equal descriptions cannot be distinguished
        self.details["descriptions"] = len(np.unique(there, axis=0))
        return forest_scores(forest, there)

    def threshold(self, suspicion: np.ndarray) -> float:
        """Threshold 1/2 of the forest's probability."""
        return 0.5

    def _parts(self, attacked: Attacked) -> list[np.ndarray]:
        return shadow_parts(attacked.users, self.config.shadow_users, self.seed)


# The attack by fit (Yeom et al. 2018, section 3): a user whom the system fits well is called a
# member.
#
# Where this differs from the paper: it compares the loss of one example with the mean training
# loss; here a user is the unit, its fit is a mean over its rows (`fedrec.attacks.membership`), and
# the median of all users replaces the mean loss.


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
# users, and a target; `fedrec.attacks.membership` has the statistic.


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
        """Scores `float64 [users]`, see `lira_scores`; the signals are saved in `signals.npz`."""
        users = attacked.users
        shadows = [system for name, system in attacked.systems.items() if name != TARGET]
        arrays = {
            "target": self.signals(attacked, attacked.target),
            "member": np.isin(users, attacked.target.members),
            "shadows": np.stack([self.signals(attacked, shadow) for shadow in shadows]),
            "masks": np.stack([np.isin(users, shadow.members) for shadow in shadows]),
        }
        with open_atomically(attacked.folder / "signals.npz") as file:
            np.savez(file, users=users, **arrays)
        return lira_scores(arrays["target"], arrays["shadows"], arrays["masks"])

    def threshold(self, suspicion: np.ndarray) -> float:
        """Threshold of the log ratio: 0, a ratio of 1."""
        return 0.0


# Attribute inference: from profiles, from recommendation lists without items of the user's real
# training rows, or from clients' updates; `fedrec.attacks.attribute` has the attacker.


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
    return [*figure_rows(figures, {}), *auc]
