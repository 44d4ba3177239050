# SPDX-License-Identifier: Apache-2.0
"""Success of attacks on experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedrec.attacks.audit.one_rating import audit_one_rating
from fedrec.baselines.private.dpsgd_pnbm import DpsgdPnbmConfig
from fedrec.components.registry import PERTURBATION
from simulations.attacks.driver import run_attack
from simulations.study.study import Found, TaskJob


def membership(
    job: TaskJob,
    dataset: str,
    experiment: str,
    row: str,
    set: Sequence[str] = (),
    shadow_users: int = 1000,
) -> list[Found]:
    """Accuracy of PrivRec's membership attack."""
    chosen = {"name": "membership", "shadow-users": shadow_users, "judged": 60}
    if job.quick:
        chosen |= {"shadow-users": 20, "judged": 4, "trees": 5}
    attacked = job.experiment(experiment, [*set, "evaluation.baselines=[]"])
    found = run_attack(attacked, chosen, job.folder).found.accuracy
    return [Found(dataset, row, "MIA accuracy", found.value, found.low, found.high)]


def attribute(
    job: TaskJob,
    dataset: str,
    experiment: str,
    row: str,
    set: Sequence[str] = (),
    sources: Sequence[str] = ("profiles",),
) -> Iterator[Found]:
    """Balanced accuracy and, of two classes, area under the curve of the neural attacker who infers
    the attribute that a perturbation protects, and the errors of the system that it attacks, where
    it needs one."""
    attacked = job.experiment(experiment, set)
    for source in sources:
        name = attacked.settings(PERTURBATION).attribute
        chosen = {"name": "attribute", "attribute": name, "source": source}
        outcome = run_attack(attacked, chosen, job.folder)
        words = "" if source == "profiles" else f" from {source}"
        success = outcome.found.balanced_accuracy
        metric = f"balanced accuracy{words}"
        yield Found(dataset, row, metric, success.value, success.low, success.high)
        if outcome.found.auc is not None:
            yield Found(dataset, row, f"AUC{words}", outcome.found.auc)
        recommends = outcome.table.get("recommends", {})
        for name in ("mae", "rmse") if recommends else ():
            yield Found(dataset, row, name.upper(), recommends[name])


def one_rating(job: TaskJob, dataset: str, ratings: int, epsilon: float) -> list[Found]:
    """Lower bound of the epsilon of PNBM's algorithm 1 for one rating of a user with some ratings,
    at the floor of its denominators."""
    config = DpsgdPnbmConfig(
        epsilon=epsilon, iterations=1, start="constant", rescale=0.05, learning_rate=0.1
    )
    found = audit_one_rating(config, ratings, 20 if job.quick else 1000)
    row = f"{ratings} ratings, epsilon {epsilon:g}"
    return [Found(dataset, row, "epsilon at least", found.epsilon)]
