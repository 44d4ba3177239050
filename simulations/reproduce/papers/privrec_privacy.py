# SPDX-License-Identifier: Apache-2.0
"""Figures of PrivRec under differential privacy: systems beside each other (4, 5) and over the
privacy budget (6, 7).

The paper prints no numbers beside these bars and curves.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulations.reproduce.papers.privrec import FRAPPE, ML
from simulations.reproduce.runs import SYSTEM, run_task
from simulations.reproduce.study import Study, Task

HITS = {f"hits@{k}": f"Hits@{k}" for k in (5, 10, 20, 30)}
HITS_20 = {"hits@20": "Hits@20"}
ALONE = ("evaluation.baselines=[]", "evaluation.every=0")
RATES = {1.0: 4000.0, 2.0: 8000.0, 5.0: 20000.0, 10.0: 22000.0, 15.0: 25000.0}
"""Epsilon -> server rate of stage one of `dp-privrec-ml1m`; those of 2, 5 and 15 were chosen on
validation users, the others lie between them or, at 1, in proportion."""
EPSILONS_ON_FRAPPE = (5.0, 10.0, 20.0, 40.0)
OWN_SYSTEMS = (
    "The paper's epsilon counts its 1,000 rounds by another accountant; ours is of the whole run."
)


def figures() -> Iterator[Study]:
    """Figures 4 to 7."""
    yield Study(
        "privrec",
        "figure4",
        "PrivRec, DP-PrivRec and DP-PrivRec-One at epsilon 5 (MovieLens-1M)",
        ("ml-1m",),
        (
            _run("privrec", "privrec-ml1m", "PrivRec", HITS, 35),
            _run("dp-privrec", "dp-privrec-ml1m", "DP-PrivRec", HITS, 25),
            _run("dp-privrec-one", "dp-privrec-one-ml1m", "DP-PrivRec-One", HITS, 25),
        ),
        (OWN_SYSTEMS,),
    )
    yield Study(
        "privrec",
        "figure5",
        "PrivRec and DP-PrivRec-One at epsilon 5 (Frappe)",
        ("frappe",),
        (
            _run("privrec", "privrec-frappe", "PrivRec", HITS, 15, FRAPPE),
            _run("dp-privrec-one", "dp-privrec-one-frappe", "DP-PrivRec-One", HITS, 10, FRAPPE),
        ),
        (OWN_SYSTEMS, "With two stages nothing is shipped for Frappe."),
    )
    yield Study(
        "privrec",
        "figure6",
        "Hits@20 over the privacy budget (MovieLens-1M)",
        ("ml-1m",),
        (
            _run("privrec", "privrec-ml1m", "PrivRec, no noise", HITS_20, 35),
            *(_at(epsilon, rate) for epsilon, rate in RATES.items()),
        ),
        (OWN_SYSTEMS,),
    )
    yield Study(
        "privrec",
        "figure7",
        "Hits@20 over the privacy budget (Frappe)",
        ("frappe",),
        (
            _run("privrec", "privrec-frappe", "PrivRec, no noise", HITS_20, 15, FRAPPE),
            *(
                _run(
                    f"dp-privrec-one-{epsilon:g}",
                    "dp-privrec-one-frappe",
                    f"DP-PrivRec-One(eps={epsilon:g})",
                    HITS_20,
                    10,
                    FRAPPE,
                    (f"privacy.epsilon={epsilon}",),
                )
                for epsilon in EPSILONS_ON_FRAPPE
            ),
        ),
        (OWN_SYSTEMS, "The server rate is that of epsilon 5 at each epsilon."),
    )


def _at(epsilon: float, rate: float) -> Task:
    """DP-PrivRec at an epsilon."""
    overrides = (
        f"privacy.epsilon={epsilon}",
        f"strategy.main.stage-one.strategy.server-lr={rate}",
        f"strategy.main.main.server-lr={rate / 2}",
    )
    name = f"DP-PrivRec(eps={epsilon:g})"
    return _run(f"dp-privrec-{epsilon:g}", "dp-privrec-ml1m", name, HITS_20, 25, ML, overrides)


def _run(
    name: str,
    experiment: str,
    model: str,
    metrics: dict[str, str],
    seconds: float,
    dataset: str = ML,
    overrides: tuple[str, ...] = (),
) -> Task:
    every = (*ALONE, *overrides)
    return run_task(
        name,
        experiment,
        every,
        dataset=dataset,
        models={SYSTEM: model},
        metrics=metrics,
        seconds=seconds,
    )
