# SPDX-License-Identifier: Apache-2.0
"""The likelihood-ratio attack on an experiment: shadow federations on random halves of the users,
and a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedrec.attacks.lira import Mode, Variance, lira_scores, undecided
from fedrec.attacks.signals import Signal, fit_signals
from fedrec.attacks.success import Success, measure
from fedrec.data.memberships import half_members, half_memberships
from fedrec.data.population import Population
from fedrec.experiment.schema import Experiment
from fedrec.runs.folder import RunFolder
from fedrec.runtime.atomic_files import open_atomically
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
class LiraOptions:
    """Settings of the attack.

    Attributes:
        shadows: number of shadow systems, even, at least 4.
        mode: online or offline.
        variance: one for all users, or one per user.
        signal: how well a model fits a user.
        fine_tune: whether the model is fine-tuned on the user's data before the signal is measured.
    """

    shadows: int = 16
    mode: Mode = "online"
    variance: Variance = "global"
    signal: Signal = "contrast"
    fine_tune: bool = False


@dataclass(frozen=True)
class LiraAttack:
    """Results of the attack.

    Attributes:
        options: the attacker's data and methods.
        success: on members and others of the target system.
        recommends: metrics of the target system.
    """

    options: LiraOptions
    success: Success
    recommends: dict[str, float]

    def table(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "attack": "lira", "success": self.success.table()}


def attack_lira(
    experiment: Experiment, options: LiraOptions, output: Path, callbacks: Sequence[Callback] = ()
) -> LiraAttack:
    """Train all systems (unless they are in `output` already) and attack the target.

    Raises:
        ExperimentError: the number of shadow systems is wrong.
        FedrecError: see `simulations.runner.run`.
    """
    population = Population.of(experiment)
    users = population.partition.training_clients
    masks = half_memberships(len(users), options.shadows, experiment.seed)
    member = half_members(len(users), experiment.seed)
    target_run = run_once(_federation(experiment, options, 0), output / "target", callbacks)
    target = _signals(experiment, population, target_run, users, options)
    shadows = np.empty(masks.shape)
    for number in range(1, options.shadows + 1):
        run = run_once(
            _federation(experiment, options, number), output / f"shadow-{number:03d}", callbacks
        )
        shadows[number - 1] = _signals(experiment, population, run, users, options)
    arrays = {"target": target, "member": member, "shadows": shadows, "masks": masks}
    with open_atomically(output / "signals.npz") as file:
        np.savez(file, users=users, **arrays)
    scores = lira_scores(target, shadows, masks, mode=options.mode, variance=options.variance)
    success = measure(scores, member, threshold=undecided(scores, options.mode))
    return LiraAttack(options, success, dict(target_run.read_result().metrics))


def _federation(experiment: Experiment, options: LiraOptions, number: int) -> Experiment:
    """The target experiment (0) or one of the shadow experiments."""
    settings = {"seed": experiment.seed, "draw": "half", "runs": options.shadows, "run": number}
    split = {"split": {"name": "members", "base": section(experiment, "split"), **settings}}
    if number == 0:
        return derived(experiment, "target", experiment.seed, split, every=0)
    return derived(
        experiment,
        f"shadow-{number:03d}",
        seed_of(experiment, "attack-run", number),
        split,
        **QUICK,
    )


def _signals(
    experiment: Experiment,
    population: Population,
    run: RunFolder,
    users: np.ndarray,
    options: LiraOptions,
) -> np.ndarray:
    """`float64 [users]`: how well a system fits each user."""
    parameters = parameters_of(run)
    blocks = scores_of(experiment, parameters, users, fine_tune=options.fine_tune)
    return np.concatenate(
        [fit_signals(scores, population, part, options.signal) for part, scores in blocks]
    )
