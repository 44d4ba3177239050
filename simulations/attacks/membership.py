# SPDX-License-Identifier: Apache-2.0
"""PrivRec's membership attack (section 4.6) on an experiment: a shadow and a target federation,
lists, a forest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedrec.attacks.membership import Describer, Encoding, forest_scores, top_lists, train_forest
from fedrec.attacks.success import Success, measure
from fedrec.data.cache import POPULATIONS
from fedrec.data.memberships import shadow_plan
from fedrec.data.population import Population
from fedrec.experiment.schema import Experiment
from server.callbacks.base import Callback
from simulations.attacks.federations import (
    QUICK,
    derived,
    parameters_of,
    scores_of,
    section,
    seed_of,
)
from simulations.study.runs import run_once


@dataclass(frozen=True)
class MembershipOptions:
    """Settings of the attack.

    Attributes:
        shadow_users: how many users the attacker has.
        used: share of them that train the shadow system.
        members: share of the other users that train the target system.
        encoding: how a list enters the forest.
        lists: of the shared model, or after each user's own fine-tuning (an attacker who has the
            user's data).
        exclude_known: whether lists leave out items of the user's training rows (likewise).
        length: items in a list.
        trees: trees of the forest.
        balanced: weigh both kinds of shadow users equally.
        judged: number of random test users on whom the target system's recommendations are
            evaluated; None: all. With fine-tuning, evaluating all takes longer than the attack
            itself.
    """

    shadow_users: int = 1000
    used: float = 0.8
    members: float = 0.5
    encoding: Encoding = "both"
    lists: Literal["shared", "fine-tuned"] = "shared"
    exclude_known: bool = False
    length: int = 10
    trees: int = 100
    balanced: bool = False
    judged: int | None = 200


@dataclass(frozen=True)
class MembershipAttack:
    """Results of the attack.

    Attributes:
        options: the attacker's data and methods.
        success: on members and others of the target system.
        descriptions: number of distinct descriptions among the attacked users; equal ones cannot be
            distinguished.
        recommends: metrics of the target system.
    """

    options: MembershipOptions
    success: Success
    descriptions: int
    recommends: dict[str, float]

    def table(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "attack": "membership", "success": self.success.table()}


def attack_membership(
    experiment: Experiment,
    options: MembershipOptions,
    output: Path,
    callbacks: Sequence[Callback] = (),
) -> MembershipAttack:
    """Train both systems (unless they are in `output` already) and attack the second.

    Raises:
        ExperimentError: too few users, or scikit-learn is missing.
        FedrecError: see `simulations.runner.run`.
    """
    POPULATIONS.renew(experiment)
    population = POPULATIONS.population(experiment)
    plan = shadow_plan(
        population.partition.training_clients,
        shadow_users=options.shadow_users,
        used_share=options.used,
        member_share=options.members,
        seed=experiment.seed,
    )
    shadow, target = _federations(experiment, options)
    shadow_run = run_once(shadow, output / "shadow", callbacks)
    target_run = run_once(target, output / "target", callbacks)
    known = np.sort(np.concatenate([plan.used, plan.unused]))
    attacked = np.sort(np.concatenate([plan.members, plan.others]))
    data = population.interactions
    describer = Describer(
        data.user_features, data.item_features, _popularity(population, known), options.encoding
    )
    seen = describer.describe(
        known, _lists(experiment, population, parameters_of(shadow_run), known, options)
    )
    there = describer.describe(
        attacked, _lists(experiment, population, parameters_of(target_run), attacked, options)
    )
    forest = train_forest(
        seen,
        np.isin(known, plan.used),
        seed=experiment.seed,
        trees=options.trees,
        balanced=options.balanced,
    )
    success = measure(forest_scores(forest, there), np.isin(attacked, plan.members), threshold=0.5)
    return MembershipAttack(
        options, success, len(np.unique(there, axis=0)), dict(target_run.read_result().metrics)
    )


def _federations(
    experiment: Experiment, options: MembershipOptions
) -> tuple[Experiment, Experiment]:
    """The shadow experiment and the target experiment."""

    def split(draw: str) -> Mapping[str, Any]:
        settings = {
            "shadow-users": options.shadow_users,
            "used": options.used,
            "members": options.members,
        }
        base = section(experiment, "split")
        return {
            "split": {
                "name": "members",
                "base": base,
                "seed": experiment.seed,
                "draw": draw,
                **settings,
            }
        }

    judged = {"every": 0, **({} if options.judged is None else {"final-users": options.judged})}
    shadow = derived(
        experiment, "shadow", seed_of(experiment, "attack-run", 0), split("shadow"), **QUICK
    )
    return shadow, derived(experiment, "target", experiment.seed, split("target"), **judged)


def _popularity(population: Population, users: np.ndarray) -> np.ndarray:
    _, items = population.liked(users)
    return np.bincount(items, minlength=population.interactions.num_items)


def _lists(
    experiment: Experiment,
    population: Population,
    parameters: Mapping[str, np.ndarray],
    users: np.ndarray,
    options: MembershipOptions,
) -> np.ndarray:
    """`int64 [users, length]`: recommendation lists of users under a system."""
    alone = options.lists == "fine-tuned" or options.exclude_known
    # Users with equal features are made adjacent, because those of a block are scored once.
    order = np.arange(len(users)) if alone else _by_features(population, users)
    lists = np.empty(
        (len(users), min(options.length, population.interactions.num_items)), dtype=np.int64
    )
    done = 0
    for part, scores in scores_of(
        experiment, parameters, users[order], fine_tune=options.lists == "fine-tuned"
    ):
        if options.exclude_known:
            scores = np.where(
                population.held_out(part, experiment.evaluation.held_out).known, -np.inf, scores
            )
        lists[order[done : done + len(part)]] = top_lists(scores, options.length)
        done += len(part)
    return lists


def _by_features(population: Population, users: np.ndarray) -> np.ndarray:
    """`int64 [users]`: positions in an order in which users with equal features are adjacent."""
    codes = population.feature_codes(users)
    return np.lexsort(np.concatenate(codes, axis=1).T) if codes else np.arange(len(users))
