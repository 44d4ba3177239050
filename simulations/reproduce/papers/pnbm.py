# SPDX-License-Identifier: Apache-2.0
"""Figures of PNBM on MovieLens-100K, with the five shipped folds, and on MovieLens-1M, with five
random ones: RMSE of private rating systems over epsilon.

The paper prints no numbers. Settings are those that were chosen on validation rows of
MovieLens-100K (docs/papers/pnbm.md), with the paper's numbers of neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulations.reproduce.quick import shrunk
from simulations.reproduce.runs import finished, values
from simulations.reproduce.study import Found, Job, Study, Task

SMALL = "ML-100K"
LARGE = "ML-1M"
NAMES = {SMALL: "ml-100k", LARGE: "ml-1m"}
NEIGHBOURS = {SMALL: 900, LARGE: 1300}
"""Of PCC and COS, as in the paper."""
SLOWER = 3
"""How many times as long a system takes on ML-1M."""
EPSILONS = (0.1, 0.5, 1.0, 5.0, 10.0, 20.0)
FOLDS = range(1, 6)
COMPARED: dict[str, dict[str, Any]] = {
    "item mean": {"name": "item-mean"},
    "PCC": {"name": "pcc", "positive-only": True, "shrinkage": 40.0},
    "COS": {"name": "cos", "among": "all", "shrinkage": 0.0},
    "PNBM, untrained": {"name": "pnbm", "start": "constant", "epochs": 0},
    "biased MF": {"name": "biased-mf", "regularisation": 0.13},
}


def figures() -> Iterator[Study]:
    """Figures 1 to 3, by data set."""
    rating = ("DPSGD-PNBM", "DPSGD-MF")
    user = ("DPPS-PNBM", "DPPS-MF")
    both = (rating[0], user[0])
    for data, suffix in ((SMALL, ""), (LARGE, "-ml1m")):
        gradients = "Epsilon of one rating: noisy gradients"
        samples = "Epsilon of a user: samples"
        yield _study(data, f"figure1{suffix}", gradients, rating, compared=True)
        yield _study(data, f"figure2{suffix}", samples, user, compared=True)
        title = "Noisy gradients and posterior samples of PNBM"
        yield _study(data, f"figure3{suffix}", title, both)


def _settings(model: str, epsilon: float) -> dict[str, Any]:
    """What was chosen for a system at an epsilon."""
    if model == "DPSGD-PNBM":
        own = {"sample": 1.0 if epsilon >= 20 else 0.05, "iterations": 1, "learning-rate": 0.4}
        return {"name": "dpsgd-pnbm", "start": "constant", **own, "rescale": 10.0, "floor": 15.0}
    if model == "DPSGD-MF":
        damping = 500.0 if epsilon < 0.5 else 50.0 if epsilon < 5 else 5.0
        own = {"learning-rate": 8e-3, "epochs": 5, "average-share": 0.9, "damping": damping}
        return {"name": "dpsgd-mf", **own}
    if model == "DPPS-PNBM":
        own = {"learning-rate": 8e-6, "temperature": 0.09, "steps": 30}
        return {"name": "dpps-pnbm", "start": "constant", **own}
    rate, penalty = (8e-6, 40.0) if epsilon < 5 else (10.0, 20.0)
    own = {"learning-rate": rate, "temperature": 1e-4, "steps": 300, "own-regularisation": penalty}
    return {"name": "dpps-mf", "factors": 5 if epsilon >= 10 else 10, **own}


def _study(
    data: str, item: str, title: str, models: tuple[str, ...], *, compared: bool = False
) -> Study:
    tasks = [
        _task(data, model, epsilon, fold)
        for epsilon in EPSILONS
        for fold in FOLDS
        for model in models
    ]
    if compared:
        tasks += [_compared(data, fold) for fold in FOLDS]
    chosen = "Settings are those that were chosen on validation rows of MovieLens-100K."
    return Study(
        "pnbm",
        item,
        f"{title} ({data})",
        (NAMES[data],),
        tuple(tasks),
        (
            "Epsilons are nominal, as the paper counts them; what they really are is in "
            "docs/papers/pnbm.md.",
            "Each of the five folds counts as one draw in the interval.",
            *((chosen,) if data == LARGE else ()),
        ),
    )


def _task(data: str, model: str, epsilon: float, fold: int) -> Task:
    def work(job: Job) -> list[Found]:
        own = {**_settings(model, epsilon), "label": model, "epsilon": epsilon, "seed": job.seed}
        return _measured(job, data, fold, [own], {model: f"{model}, epsilon {epsilon:g}"})

    name = f"{model.lower()}-{epsilon:g}-fold{fold}"
    sample = fold == 1 and epsilon == 1
    seconds = 2 if model.startswith("DPSGD") else 30 if "PNBM" in model else 8
    return Task(name, seconds * (SLOWER if data == LARGE else 1), work, sample=sample)


def _compared(data: str, fold: int) -> Task:
    def work(job: Job) -> list[Found]:
        own = [{**options, "label": label} for label, options in COMPARED.items()]
        for options in own:
            if options["name"] in ("pcc", "cos"):
                options["neighbours"] = NEIGHBOURS[data]
        return _measured(job, data, fold, own, {label: label for label in COMPARED})

    seconds = 5 * (SLOWER if data == LARGE else 1)
    return Task(f"compared-fold{fold}", seconds, work, seeded=False, sample=fold == 1)


def _measured(
    job: Job, data: str, fold: int, baselines: list[dict[str, Any]], models: dict[str, str]
) -> list[Found]:
    from fedrec.data.reader import data_directory

    split: dict[str, Any] = {"name": "kfold", "fold": fold}
    if data == SMALL:
        split |= {"shipped": True, "folder": str(data_directory() / "ml-100k")}
    table = {
        "name": "pnbm-figure",
        "task": "rating",
        "dataset": {"name": NAMES[data]},
        "split": split,
        "evaluation": {"baselines": baselines},
    }
    result = finished(job, shrunk(table) if job.quick else table, [])
    return list(values(result, data, models, {"rmse": "RMSE"}))
