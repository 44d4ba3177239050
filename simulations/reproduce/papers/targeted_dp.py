# SPDX-License-Identifier: Apache-2.0
"""Figures of the poster on targeted differential privacy: rating errors and the attacker over the
data budget.

The poster prints no numbers; what it claims is in docs/papers/targeted-dp.md. Points are those of
`grids.targeted_dp`.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulations.reproduce.grids.targeted_dp import SYSTEMS, Setting, settings
from simulations.reproduce.quick import shrunk
from simulations.reproduce.runs import SYSTEM, run_task
from simulations.reproduce.study import Found, Job, Study, Task

DATASET = "MovieLens-1M"
EPSILONS = (0.1, 3.0)
BUDGETS = (0.0, 0.3, 0.7)
ATTACKED = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
ERRORS = {"rmse": "RMSE", "mae": "MAE"}
SECONDS = {"metamf": 20.0, "mf": 6.0}


def figures() -> Iterator[Study]:
    """Figures 2 to 4."""
    yield Study(
        "targeted-dp",
        "figure2",
        "Rating errors over the data budget, by what is protected",
        ("ml-1m",),
        tuple(_errors(one) for one in settings(SYSTEMS, EPSILONS, BUDGETS, 1)),
        (
            "The poster names no dataset and no system beside meta matrix factorization; ours are "
            "MovieLens-1M and `mf`.",
        ),
        seeds=3,
    )
    yield Study(
        "targeted-dp",
        "figure3",
        "Success of the attribute attack over the data budget",
        ("ml-1m",),
        tuple(_attack(one) for one in settings(("attack",), EPSILONS, ATTACKED, 1)),
        ("The attacker sees the perturbed profiles, and tells gender.",),
        seeds=3,
    )
    yield Study(
        "targeted-dp",
        "figure4",
        "Rating errors against the success of the attribute attack, by what is protected",
        ("ml-1m",),
        (
            *(_errors(one) for one in settings(("metamf",), EPSILONS, BUDGETS, 1)),
            *(_attack(one) for one in settings(("attack",), EPSILONS, BUDGETS, 1)),
        ),
        ("A point has its RMSE in one row and the attacker's balanced accuracy in another.",),
        seeds=3,
    )


def _label(setting: Setting) -> str:
    if setting.select == "all":
        return (
            "nothing protected"
            if setting.budget == 1
            else f"all protected, epsilon {setting.epsilon:g}"
        )
    return f"{setting.select}, epsilon {setting.epsilon:g}, budget {setting.budget:g}"


def _name(setting: Setting) -> str:
    return f"{setting.system}-{setting.select}-{setting.epsilon:g}-{setting.budget:g}"


def _errors(setting: Setting) -> Task:
    overrides = [text for text in setting.overrides() if not text.startswith("seed=")]
    return run_task(
        _name(setting),
        f"targeted-dp-{setting.system}-ml1m",
        (*overrides, "evaluation.baselines=[]"),
        dataset=DATASET,
        models={SYSTEM: f"{setting.system}: {_label(setting)}"},
        metrics=ERRORS,
        seconds=SECONDS[setting.system],
        sample=setting.epsilon != EPSILONS[0] and setting.budget in (0.3, 1.0),
    )


def _attack(setting: Setting) -> Task:
    def work(job: Job) -> list[Found]:
        from fedrec.components.registry import PERTURBATION
        from fedrec.experiment.loading import load, read
        from simulations.attacks.attribute import AttributeOptions, attack_attribute

        table = read("targeted-dp-mf-ml1m", setting.overrides())
        experiment = load(shrunk(table) if job.quick else table, [f"seed={job.seed}"])
        options = AttributeOptions(experiment.settings(PERTURBATION).attribute)
        found = attack_attribute(experiment, options, job.folder).success.balanced_accuracy
        return [
            Found(DATASET, _label(setting), "balanced accuracy", found.value, found.low, found.high)
        ]

    return Task(_name(setting), 30, work, sample=setting.epsilon != EPSILONS[0])
