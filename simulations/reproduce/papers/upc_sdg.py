# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of UPC-SDG (Liu et al. 2022) on Amazon Office: recommenders that learn from
synthetic rows, and how alike these are to the real ones.

The paper prints no numbers beside the curves of its figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from simulations.reproduce.quick import shrunk
from simulations.reproduce.runs import run_task
from simulations.reproduce.study import Found, Job, Study, Task

METRICS = {"precision@20": "Precision@20", "recall@20": "Recall@20", "ndcg-list@20": "NDCG@20"}
MODELS = {"random": "Random", "bprmf": "BPRMF", "neumf": "NeuMF", "lightgcn": "LightGCN"}
SETTINGS: dict[str, dict[str, Any]] = {
    "lightgcn": {"epochs": 600, "decay": 0.01},
    "neumf": {"epochs": 20, "regularisation": 0.01},
}
"""What was chosen on validation rows (docs/papers/upc-sdg.md), where it is no default."""
CORNERS: dict[str, dict[str, Any] | None] = {
    "Office": None,
    "Office+": {"name": "upc-sdg", "replacement-ratio": 0.2, "sensitivity": 0.9},
    "Office-": {"name": "upc-sdg", "replacement-ratio": 0.8, "sensitivity": 0.1},
}
GRID = tuple(itertools.product((0.2, 0.4, 0.6, 0.8), (0.1, 0.3, 0.5, 0.7, 0.9)))
"""k and gamma."""
SAMPLE = ((0.2, 0.9), (0.8, 0.1))
"""Those of Office+ and Office-."""
ABLATIONS: dict[str, dict[str, Any]] = {
    "UPC-SDG": {},
    "UPC-SDG_s (random selection)": {"select": "random"},
    "UPC-SDG_r (random generation)": {"generate": "random"},
    "UPC-SDG_f (fixed similarity)": {"generate": "fixed-similarity"},
}


def tables() -> Iterator[Study]:
    """Tables 2 and 3."""
    yield Study(
        "upc-sdg",
        "table2",
        "Recommenders on original (Office) and synthetic rows (Office+: k .2, gamma .9; Office-: "
        "k .8, gamma .1)",
        ("amazon-upc",),
        tuple(
            _task(dataset, dataset, perturb, MODELS, 150) for dataset, perturb in CORNERS.items()
        ),
        (
            "Clothing is not among the data at hand; Gowalla is not run here, as it takes hours.",
            "The paper's NeuMF columns are of another evaluation: their NDCG is above their "
            "Recall.",
        ),
    )
    yield Study(
        "upc-sdg",
        "table3",
        "Ablations on Office, gamma .9",
        ("amazon-upc",),
        tuple(
            _task(
                f"{letter}-{ratio:g}",
                "Office",
                {"name": "upc-sdg", "replacement-ratio": ratio, "sensitivity": 0.9, **change},
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
    """Figures 2 and 4."""
    yield Study(
        "upc-sdg",
        "figure2",
        "BPRMF on synthetic rows of Office over gamma, by k",
        ("amazon-upc",),
        tuple(
            _task(
                f"k{ratio:g}-gamma{gamma:g}",
                "Office",
                _perturbation(ratio, gamma),
                {"bprmf": f"BPRMF, k={ratio:g}, gamma={gamma:g}"},
                25,
                sample=(ratio, gamma) in SAMPLE,
            )
            for ratio, gamma in GRID
        ),
    )
    yield Study(
        "upc-sdg",
        "figure4",
        "Mean similarity of originals and substitutes over gamma, by k (Office)",
        ("amazon-upc",),
        tuple(_similarity(ratio, gamma) for ratio, gamma in GRID),
        ("Similarity as in definition 2, between BPR-MF embeddings of the real rows.",),
    )


def _perturbation(ratio: float, gamma: float) -> dict[str, Any]:
    return {"name": "upc-sdg", "replacement-ratio": ratio, "sensitivity": gamma}


def _similarity(ratio: float, gamma: float) -> Task:
    def work(job: Job) -> list[Found]:
        from fedrec.data.population import Population
        from fedrec.experiment.loading import load
        from fedrec.perturb.mean_similarity import FIGURE

        table = {**_table(_perturbation(ratio, gamma)), "rounds": 1}
        population = Population.of(
            load(shrunk(table) if job.quick else table, [f"seed={job.seed}"])
        )
        perturbed = population.perturbed
        by_gamma = {} if perturbed is None else perturbed.figures[FIGURE]
        return [
            Found("Office", f"k={ratio:g}, gamma={gamma:g}", "similarity", one["paper"])
            for one in by_gamma.values()
        ]

    return Task(f"k{ratio:g}-gamma{gamma:g}", 15, work, sample=(ratio, gamma) in SAMPLE)


def _task(
    name: str,
    dataset: str,
    perturb: dict[str, Any] | None,
    models: dict[str, str],
    seconds: float,
    sample: bool = True,
) -> Task:
    table = _table(perturb)
    table["evaluation"] = {
        "masked": "both",
        "ks": [20],
        "baselines": [{"name": name, **SETTINGS.get(name, {})} for name in models],
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


def _table(perturb: dict[str, Any] | None) -> dict[str, Any]:
    """An experiment on the authors' files of Office, its training rows perturbed."""
    table: dict[str, Any] = {
        "name": "upc-sdg-table",
        "dataset": {"name": "amazon-upc"},
        "split": {"name": "published"},
    }
    return table | ({} if perturb is None else {"perturb": perturb})
