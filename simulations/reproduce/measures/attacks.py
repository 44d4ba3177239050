# SPDX-License-Identifier: Apache-2.0
"""Success of attacks on experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedrec.components.registry import PERTURBATION
from simulations.attacks.attribute import AttributeOptions, Source, attack_attribute
from simulations.attacks.membership import MembershipOptions, attack_membership
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
    options = MembershipOptions(shadow_users=shadow_users, judged=60)
    if job.quick:
        options = MembershipOptions(shadow_users=20, judged=4, trees=5)
    attacked = job.experiment(experiment, [*set, "evaluation.baselines=[]"])
    found = attack_membership(attacked, options, job.folder).success.accuracy
    return [Found(dataset, row, "MIA accuracy", found.value, found.low, found.high)]


def attribute(
    job: TaskJob,
    dataset: str,
    experiment: str,
    row: str,
    set: Sequence[str] = (),
    sources: Sequence[Source] = ("profiles",),
) -> Iterator[Found]:
    """Balanced accuracy and area under the curve of the neural attacker who infers the attribute
    that a perturbation protects, and the errors of the system that it attacks, where it needs one.
    """
    attacked = job.experiment(experiment, set)
    for source in sources:
        options = AttributeOptions(attacked.settings(PERTURBATION).attribute, source=source)
        found = attack_attribute(attacked, options, job.folder)
        words = "" if source == "profiles" else f" from {source}"
        success = found.success.balanced_accuracy
        metric = f"balanced accuracy{words}"
        yield Found(dataset, row, metric, success.value, success.low, success.high)
        yield Found(dataset, row, f"AUC{words}", found.success.auc or 0.0)
        for name in ("mae", "rmse") if found.recommends else ():
            yield Found(dataset, row, name.upper(), found.recommends[name])
