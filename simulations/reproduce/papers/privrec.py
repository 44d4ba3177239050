# SPDX-License-Identifier: Apache-2.0
"""Tables of PrivRec (Wang et al. 2021): systems beside each other, epsilons, the membership
attack."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from simulations.reproduce.quick import shrunk
from simulations.reproduce.runs import SYSTEM, run_task
from simulations.reproduce.study import Found, Job, Study, Task

ML = "MovieLens-1M"
FRAPPE = "Frappe"
METRICS = {
    f"{ours}@{k}": f"{theirs}@{k}"
    for ours, theirs in (("hits", "Hits"), ("ndcg", "nDCG"))
    for k in (5, 10, 20, 30)
}
BESIDE = {"popularity": "popularity", "ease": "EASE"}
ROUNDS = 1000
NOISE = 1.0
DELTAS = (0.0, 1e-8, 1e-6, 1e-4)
NCF = "{name='neumf', factors=128, regularisation=0.005, epochs=12, average=0.999}"
"""NeuMF with the settings of `central-ml1m`, chosen on validation users."""
COHORTS = {ML: (4800, (5, 10, 15, 20, 25, 30)), FRAPPE: (760, (2, 5, 8, 10, 12, 15))}
WITH_TEST_USERS = (
    "NCF needs users whom it was trained with, and FedGNN ranks by a vector that devices compute "
    "in its rounds: these two learn from the known halves of the test users, too, as iALS does."
)
ON_FRAPPE = "Of the systems, PrivRec alone has settings for Frappe; the other rows stay empty."
NDCG = "The paper's nDCG cannot follow from its own definition, so Hits is the figure to compare."

ALONE = (
    ("privrec-cen", "PrivRec-CEN", 60),
    ("privrec-sgd", "PrivRec-SGD", 15),
    ("nn-maml", "NN-SELF", 160),
    ("nn-self", "NN-SELF, stand-alone", 20),
    ("fofl-self", "FOFL-SELF", 30),
    ("fcf", "FCF", 90),
    ("fedgnn-privrec", "FedGNN", 300),
)
"""Shipped experiments on MovieLens-1M without `-ml1m`, their rows in table 2, and seconds."""


def tables() -> Iterator[Study]:
    """Tables 2 to 6."""
    yield Study(
        "privrec",
        "table2",
        "Recommendation on MovieLens-1M",
        ("ml-1m",),
        (
            run_task(
                "privrec",
                "privrec-ml1m",
                dataset=ML,
                models={SYSTEM: "PrivRec", **BESIDE},
                metrics=METRICS,
                seconds=40,
            ),
            *(_alone(*one) for one in ALONE),
            run_task(
                "ncf",
                "central-ml1m",
                (f"evaluation.baselines=[{NCF}, 'ials']",),
                dataset=ML,
                models={"neumf": "NCF", "ials": "iALS"},
                metrics=METRICS,
                seconds=70,
            ),
        ),
        (
            NDCG,
            WITH_TEST_USERS,
            "NN-SELF is read as meta-learned (`nn-maml-ml1m`); read as a network of each user's "
            "own it is the row below it.",
        ),
    )
    yield Study(
        "privrec",
        "table3",
        "Recommendation on Frappe",
        ("frappe",),
        (
            run_task(
                "privrec",
                "privrec-frappe",
                dataset=FRAPPE,
                models={SYSTEM: "PrivRec", **BESIDE},
                metrics=METRICS,
                seconds=120,
            ),
        ),
        (NDCG, ON_FRAPPE, "Frappe has no ratings; every use of an app counts."),
    )
    for item, dataset in (("table4", ML), ("table5", FRAPPE)):
        yield _epsilons(item, dataset)
    yield _membership()


def _alone(name: str, row: str, seconds: float) -> Task:
    """A row of table 2 that is an experiment of its own, without baselines."""
    return run_task(
        name,
        f"{name}-ml1m",
        ("evaluation.baselines=[]",),
        dataset=ML,
        models={SYSTEM: row},
        metrics=METRICS,
        seconds=seconds,
    )


def _epsilons(item: str, dataset: str) -> Study:
    """Tables 4 and 5: the paper's arithmetic, and what 1,000 rounds cost."""
    clients, cohorts = COHORTS[dataset]

    def work(job: Job) -> Iterator[Found]:
        from fedrec.privacy.accounting.accountant import Accountant
        from fedrec.privacy.accounting.events import GaussianRound
        from fedrec.privacy.accounting.sampling import FixedSize

        rows = {"DP-PrivRec": "paper", "each round counted once, autodp": "autodp"}
        rows |= {"each round counted once, PLD": "pld"}
        for cohort, (model, backend) in itertools.product(
            cohorts[:1] if job.quick else cohorts, rows.items()
        ):
            accountant = Accountant(backend)
            accountant.step(GaussianRound(FixedSize(cohort, clients), "replace-one", NOISE), ROUNDS)
            for delta in DELTAS:
                metric = f"epsilon, q={cohort}/{clients}, delta={delta:g}"
                yield Found(dataset, model, metric, accountant.epsilon(delta).epsilon)

    return Study(
        "privrec",
        item,
        f"Epsilon of 1,000 rounds with {clients} clients ({dataset})",
        (),
        (Task("epsilons", 20, lambda job: list(work(job)), seeded=False),),
        (
            "The printed epsilons count every client of a round as a release of its own; the "
            "server releases one sum a round, "
            "which is what the rows below them count.",
        ),
    )


_RATES = {2.0: 8000.0, 5.0: 20000.0, 15.0: 25000.0}


def _membership() -> Study:
    """Table 6: the accuracy of the membership attack."""
    private = [
        _attack(
            f"dp-privrec-{epsilon:g}",
            "dp-privrec-ml1m",
            (
                f"privacy.epsilon={epsilon}",
                f"strategy.main.stage-one.strategy.server-lr={rate}",
                f"strategy.main.main.server-lr={rate / 2}",
            ),
            ML,
            f"DP-PrivRec(eps={epsilon:g})",
            30,
        )
        for epsilon, rate in _RATES.items()
    ]
    return Study(
        "privrec",
        "table6",
        "Accuracy of the membership attack",
        ("ml-1m", "frappe"),
        (
            _attack("privrec", "privrec-ml1m", (), ML, "PrivRec", 60),
            *private,
            _attack(
                "lm-privrec-15",
                "lm-privrec-ml1m",
                ("privacy.epsilon=15.0",),
                ML,
                "LM-PrivRec(eps=15)",
                25,
            ),
            _attack(
                "privrec-frappe", "privrec-frappe", (), FRAPPE, "PrivRec", 10, shadow_users=300
            ),
            _attack(
                "dp-privrec-one-frappe",
                "dp-privrec-one-frappe",
                ("privacy.epsilon=5.0",),
                FRAPPE,
                "DP-PrivRec(eps=5)",
                5,
                shadow_users=300,
            ),
        ),
        (
            "On Frappe the private system is DP-PrivRec-One, and at epsilon 20 and 40 nothing is "
            "shipped: these rows stay empty.",
            "Intervals are of the attacker's accuracy over the attacked users.",
        ),
    )


def _attack(
    name: str,
    experiment: str,
    overrides: tuple[str, ...],
    dataset: str,
    model: str,
    seconds: float,
    shadow_users: int = 1000,
) -> Task:
    def work(job: Job) -> list[Found]:
        from fedrec.experiment.loading import load, read
        from simulations.attacks.membership import MembershipOptions, attack_membership

        table = read(experiment, overrides)
        options = MembershipOptions(shadow_users=shadow_users, judged=60)
        if job.quick:
            table = shrunk(table)
            options = replace(options, shadow_users=20, judged=4, trees=5)
        table["evaluation"] = {**table.get("evaluation", {}), "baselines": []}
        loaded = load(table, [f"seed={job.seed}", "engine.name=serial"])
        accuracy = attack_membership(loaded, options, job.folder).success.accuracy
        return [Found(dataset, model, "MIA accuracy", accuracy.value, accuracy.low, accuracy.high)]

    return Task(name, seconds, work)
