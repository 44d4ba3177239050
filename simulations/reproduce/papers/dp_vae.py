# SPDX-License-Identifier: Apache-2.0
"""Tables and figure 3 of DP-VAE (Fang et al. 2022) on MovieLens-100K; the runs are the cells of
`grids.dp_vae`.

These studies do not use ML-20M and Netflix.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulations.reproduce.grids.dp_vae import cells
from simulations.reproduce.runs import SYSTEM, run_task
from simulations.reproduce.study import Study, Task

DATASET = "ML-100K"
METRICS = {"ndcg-list@100": "NDCG@100", "recall@20": "Recall@20", "recall@50": "Recall@50"}
LENGTHS = (10, 20, 30, 50, 75, 100)
"""R of figure 3."""
LISTS = (
    "The paper's Recall@20 above its Recall@50 cannot be of held-out items; ours are "
    "(docs/papers/dp-vae.md)."
)
CENTRAL = """evaluation.baselines=[
    "popularity", {name="ease", regularisation=300.0}, {name="item-knn", neighbours=100},
    {name="puresvd", factors=20}, {name="warp", factors=40, epochs=20}, "vae",
    {name="dpmf", label="dpmf-1", epsilon=1.0},
    {name="dpae", label="dpae-1", epsilon=1.0}]""".replace("\n", " ")
SYSTEMS = {
    "popularity": "popularity",
    "ease": "EASE",
    "item-knn": "KNN",
    "puresvd": "SVD",
    "warp": "LightFM",
    "vae": "VAE, central",
    "dpmf-1": "DPMF",
    "dpae-1": "DPAE",
}
KINDS = {"": "OL", ", constant": "DP", ", optimal": "DP-O"}


def tables() -> Iterator[Study]:
    """Tables 6 to 8, 10 and 11."""
    yield _study(
        "table6",
        "Fixed priors (NUP) and user-level priors (ULP)",
        _cell("vae", "federated", "VAE", "VAE, NUP", 16),
        _cell("vae-priors", "federated", "VAE, priors", "VAE, ULP", 60),
        _cell("dp-vae", "parts", "optimal", "DP-VAE, NUP", 6),
        _cell("dp-vae-priors", "parts", "optimal, priors", "DP-VAE, ULP", 6),
    )
    yield _study(
        "table7",
        "Constant (CCB) and optimal (OCB) clip norms",
        _cell("constant", "parts", "constant", "DP-VAE, CCB", 6),
        _cell("optimal", "parts", "optimal", "DP-VAE, OCB", 6),
    )
    yield _study(
        "table8",
        "Systems beside each other, epsilon up to 1",
        _cell("vae", "federated", "VAE", "VAE", 16),
        _cell("dp-vae", "budgets", "sound, up to 1.0", "DP-VAE", 5),
        _central(),
        more=("SVD is PureSVD, LightFM the WARP loss without side features; KNN is item-based.",),
    )
    yield _study(
        "table10",
        "DP-VAE over the users' budgets",
        _cell("vae", "federated", "VAE", "VAE", 16),
        *(
            _cell(
                f"{mode}-{budget:g}",
                "budgets",
                f"{cell}, up to {budget}",
                f"DP-VAE(eps<={budget:g}){suffix}",
                5,
            )
            for mode, cell, suffix in (
                ("sound", "sound", ""),
                ("tamed", "paper, tamed", ", the paper's clip norms"),
            )
            for budget in (0.3, 0.5, 1.0, 1.5)
        ),
        more=(
            "DP-VAE has noise for all of a user's data; the rows below have the paper's clip "
            "norms, and no finite epsilon.",
        ),
    )
    yield _study(
        "table11",
        "Other models under the same noise",
        *(
            _cell(f"{model}-{kind}".lower(), "table 11", f"{model}{how}", f"{model}/{kind}", 60)
            for model in ("SVD", "MF", "AE")
            for how, kind in KINDS.items()
        ),
    )


def _central() -> Task:
    return run_task(
        "central",
        "central-ml100k",
        (CENTRAL,),
        dataset=DATASET,
        models=SYSTEMS,
        metrics=METRICS,
        seconds=15,
    )


def figures() -> Iterator[Study]:
    """Figure 3, part (a)."""
    curves = {
        f"{ours}@{length}": f"{theirs}@{length}"
        for ours, theirs in (("ndcg-list", "NDCG"), ("recall", "Recall"))
        for length in LENGTHS
    }
    lengths = f"evaluation.ks={list(LENGTHS)}"
    yield Study(
        "dp-vae",
        "figure3",
        "NDCG and Recall over the length of the list (MovieLens-100K)",
        ("ml-100k",),
        (
            _cell("vae", "federated", "VAE", "VAE", 18, lengths, curves),
            _cell("dp-vae", "budgets", "sound, up to 1.0", "DP-VAE", 5, lengths, curves),
            run_task(
                "central",
                "central-ml100k",
                (CENTRAL, lengths),
                dataset=DATASET,
                models=SYSTEMS,
                metrics=curves,
                seconds=20,
            ),
        ),
        (LISTS, "Parts (b) and (c) are of ML-20M and Netflix, which are not among the data."),
    )


def _study(item: str, title: str, *tasks: Task, more: tuple[str, ...] = ()) -> Study:
    return Study(
        "dp-vae", item, f"{title} (MovieLens-100K)", ("ml-100k",), tasks, (LISTS, *more), seeds=5
    )


def _cell(
    name: str,
    group: str,
    cell: str,
    model: str,
    seconds: float,
    override: str = "",
    metrics: dict[str, str] = METRICS,
) -> Task:
    experiment, overrides = cells()[group][cell]
    return run_task(
        name,
        experiment,
        (*overrides, *([override] if override else [])),
        dataset=DATASET,
        models={SYSTEM: model},
        metrics=metrics,
        seconds=seconds,
    )
