# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of UPC-SDG (Liu et al. 2022) on Amazon Office and Gowalla: recommenders that
learn from synthetic rows, and how alike these are to the real ones.

The paper prints no numbers beside the curves of its figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from simulations.reproduce.quick import shrunk
from simulations.reproduce.runs import run_task
from simulations.reproduce.study import Found, Job, Study, Task

METRICS = {"precision@20": "Precision@20", "recall@20": "Recall@20", "ndcg-list@20": "NDCG@20"}
MODELS = {"random": "Random", "bprmf": "BPRMF", "neumf": "NeuMF", "lightgcn": "LightGCN"}
CORNERS: dict[str, dict[str, Any] | None] = {
    "": None,
    "+": {"name": "upc-sdg", "replacement-ratio": 0.2, "sensitivity": 0.9},
    "-": {"name": "upc-sdg", "replacement-ratio": 0.8, "sensitivity": 0.1},
}
GRID = tuple(itertools.product((0.2, 0.4, 0.6, 0.8), (0.1, 0.3, 0.5, 0.7, 0.9)))
"""k and gamma."""
SAMPLE = ((0.2, 0.9), (0.8, 0.1))
"""Those of the corners."""
ABLATIONS: dict[str, dict[str, Any]] = {
    "UPC-SDG": {},
    "UPC-SDG_s (random selection)": {"select": "random"},
    "UPC-SDG_r (random generation)": {"generate": "random"},
    "UPC-SDG_f (fixed similarity)": {"generate": "fixed-similarity"},
}


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        title: as the paper calls it.
        name: of our dataset.
        models: recommenders of table 2, with what was chosen on validation rows where it is no
            default (docs/papers/upc-sdg.md).
        seconds: of a training and ranking with each of them.
        generating: seconds until a synthetic table is there.
    """

    title: str
    name: str
    models: dict[str, dict[str, Any]]
    seconds: float
    generating: float

    @property
    def embeddings(self) -> dict[str, Any]:
        """Settings of the embeddings that a perturbation learns: those of BPRMF."""
        own = self.models["bprmf"]
        return {"embeddings": own} if own else {}


OFFICE = Data(
    "Office",
    "amazon-upc",
    {
        "random": {},
        "bprmf": {},
        "neumf": {"epochs": 20, "regularisation": 0.01},
        "lightgcn": {"epochs": 600, "decay": 0.01},
    },
    seconds=140,
    generating=10,
)
GOWALLA = Data(
    "Gowalla",
    "gowalla",
    {
        "random": {},
        "bprmf": {"epochs": 400, "learning-rate": 0.02, "regularisation": 0.01},
        "lightgcn": {
            "epochs": 200,
            "precision": "bfloat16",
            "batch-size": 16384,
            "learning-rate": 0.01,
            "final-rate": 0.02,
        },
    },
    seconds=850,
    generating=220,
)
BPRMF_SECONDS = {"Office": 15, "Gowalla": 150}


def tables() -> Iterator[Study]:
    """Tables 2, by data set, and 3."""
    yield _table_2(
        OFFICE,
        "table2",
        "The paper's NeuMF columns are of another evaluation: their NDCG is above their Recall.",
        "Clothing is not among the data at hand; Gowalla is `table2-gowalla`.",
    )
    yield _table_2(
        GOWALLA,
        "table2-gowalla",
        "NeuMF's rows stay empty: its settings were not chosen on Gowalla, and the paper's are of "
        "another evaluation (their NDCG is above their Recall).",
        "LightGCN has the settings of `central-gowalla`, which were not searched.",
    )
    yield Study(
        "upc-sdg",
        "table3",
        "Ablations on Office, gamma .9",
        ("amazon-upc",),
        tuple(
            _task(
                OFFICE,
                f"{letter}-{ratio:g}",
                "Office",
                {**_perturbation(OFFICE, ratio, 0.9), **change},
                {"bprmf": f"BPRMF on {name}, k={ratio:g}, gamma=0.9"},
                25,
            )
            for ratio, (letter, (name, change)) in itertools.product(
                (0.2, 0.4, 0.6, 0.8), zip("usrf", ABLATIONS.items(), strict=True)
            )
        ),
        ("The rows of the paper's variants are of another dataset than those of the full model.",),
    )


def figures() -> Iterator[Study]:
    """Figures 2 and 4, by data set."""
    yield _figure_2(OFFICE, "figure2")
    yield _figure_2(GOWALLA, "figure2-gowalla")
    yield _figure_4(OFFICE, "figure4")
    yield _figure_4(GOWALLA, "figure4-gowalla")


def _table_2(data: Data, item: str, *differs: str) -> Study:
    title = data.title
    return Study(
        "upc-sdg",
        item,
        f"Recommenders on original ({title}) and synthetic rows ({title}+: k .2, gamma .9; "
        f"{title}-: k .8, gamma .1)",
        (data.name,),
        tuple(
            _task(
                data,
                f"{title}{corner}",
                f"{title}{corner}",
                None if perturb is None else {**perturb, **data.embeddings},
                {name: MODELS[name] for name in data.models},
                data.seconds + (0 if perturb is None else data.generating),
            )
            for corner, perturb in CORNERS.items()
        ),
        differs,
        published=title,
    )


def _figure_2(data: Data, item: str) -> Study:
    return Study(
        "upc-sdg",
        item,
        f"BPRMF on synthetic rows of {data.title} over gamma, by k",
        (data.name,),
        tuple(
            _task(
                data,
                f"k{ratio:g}-gamma{gamma:g}",
                data.title,
                _perturbation(data, ratio, gamma),
                {"bprmf": f"BPRMF, k={ratio:g}, gamma={gamma:g}"},
                BPRMF_SECONDS[data.title] + data.generating,
                sample=(ratio, gamma) in SAMPLE,
            )
            for ratio, gamma in GRID
        ),
    )


def _figure_4(data: Data, item: str) -> Study:
    return Study(
        "upc-sdg",
        item,
        f"Mean similarity of originals and substitutes over gamma, by k ({data.title})",
        (data.name,),
        tuple(_similarity(data, ratio, gamma) for ratio, gamma in GRID),
        ("Similarity as in definition 2, between BPR-MF embeddings of the real rows.",),
    )


def _perturbation(data: Data, ratio: float, gamma: float) -> dict[str, Any]:
    own = {"name": "upc-sdg", "replacement-ratio": ratio, "sensitivity": gamma}
    return {**own, **data.embeddings}


def _similarity(data: Data, ratio: float, gamma: float) -> Task:
    def work(job: Job) -> list[Found]:
        from fedrec.data.population import Population
        from fedrec.experiment.loading import load
        from fedrec.perturb.mean_similarity import FIGURE

        table = {**_table(data, _perturbation(data, ratio, gamma)), "rounds": 1}
        population = Population.of(
            load(shrunk(table) if job.quick else table, [f"seed={job.seed}"])
        )
        perturbed = population.perturbed
        by_gamma = {} if perturbed is None else perturbed.figures[FIGURE]
        return [
            Found(data.title, f"k={ratio:g}, gamma={gamma:g}", "similarity", one["paper"])
            for one in by_gamma.values()
        ]

    seconds = 5 + data.generating
    return Task(f"k{ratio:g}-gamma{gamma:g}", seconds, work, sample=(ratio, gamma) in SAMPLE)


def _task(
    data: Data,
    name: str,
    dataset: str,
    perturb: dict[str, Any] | None,
    models: dict[str, str],
    seconds: float,
    sample: bool = True,
) -> Task:
    table = _table(data, perturb)
    table["evaluation"] = {
        "masked": "both",
        "ks": [20],
        "baselines": [{"name": name, **data.models[name]} for name in models],
    }
    return run_task(
        name.lower(),
        table,
        dataset=dataset,
        models=models,
        metrics=METRICS,
        seconds=seconds,
        sample=sample,
    )


def _table(data: Data, perturb: dict[str, Any] | None) -> dict[str, Any]:
    """An experiment on the authors' split of a data set, its training rows perturbed."""
    table: dict[str, Any] = {
        "name": "upc-sdg-table",
        "dataset": {"name": data.name},
        "split": {"name": "published"},
    }
    return table | ({} if perturb is None else {"perturb": perturb})
