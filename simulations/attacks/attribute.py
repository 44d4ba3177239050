# SPDX-License-Identifier: Apache-2.0
"""Attribute inference: from profiles, from recommendation lists, or from clients' updates;
`fedrec.attacks.attribute` has the attacker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from fedrec.attacks.attribute import Inference, Scaling, infer_attribute
from fedrec.attacks.membership import one_hot
from fedrec.config import Config, did_you_mean
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from simulations.attacks.base import TARGET, Attack, Attacked, AttackOutcome, AttackRun, figure_rows

LENGTH = 10
"""Length of lists, without items of the user's real training rows."""


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
            return one_hot(attacked.target.lists(users, LENGTH, as_shown=True), items)
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
