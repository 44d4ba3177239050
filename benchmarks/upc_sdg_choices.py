# SPDX-License-Identifier: Apache-2.0
"""What the paper of UPC-SDG leaves open, on validation rows: a tenth of the training file.

    FEDREC_DATA=DATA python benchmarks/upc_sdg_choices.py FILE.json --data office --what neumf

`generator` varies the generator and its attention one thing at a time, `noisy-cooccurrence` that
generator, and both measure BPR-MF on what comes out; a recommender's name varies the recommender
itself on the original rows, BPR-MF with one training for all numbers of epochs. On Gowalla 1,000
users are tested, the same ones each time. What is in the file is not measured again; `--show`
prints the file as a table, best first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.upc_sdg import (
    MODELS,
    Setting,
    made,
    measure,
    metrics_of,
    population_of,
    tested_users,
    training_histories,
    upc,
    utility,
)

TESTED = {"office": None, "gowalla": 1000}
EPOCHS = {"office": (200, 400, 800), "gowalla": (25, 50, 100, 200, 400, 800, 1600)}
"""Numbers of epochs of BPR-MF that are measured along one training."""
FALLEN = 0.005
"""Recall below the best of a training at which it is ended."""
GRIDS: dict[tuple[str, str], dict[str, list[Any]]] = {
    ("gowalla", "bprmf"): {
        "learning-rate": [0.02, 0.05, 0.1],
        "regularisation": [0.01, 0.005, 0.003, 0.02, 0.001],
    },
    ("office", "bprmf"): {
        "learning-rate": [0.05, 0.02],
        "regularisation": [0.05, 0.08, 0.12],
    },
    ("office", "ease"): {"regularisation": [25.0, 50.0, 100.0, 200.0, 400.0, 800.0]},
    ("office", "neumf"): {
        "regularisation": [0.0, 0.003, 0.01, 0.03],
        "epochs": [10, 20, 40],
    },
}


def generators() -> dict[str, Setting]:
    """One thing changed at a time, in the middle of the paper's grid of k and gamma."""
    changes: dict[str, dict[str, Any]] = {
        "as shipped": {},
        "best": {"draw": "best"},
        "beta=0": {"attention": {"beta": 0.0}},
        "beta=1": {"attention": {"beta": 1.0}},
        "hidden=32": {"attention": {"hidden": 32}},
        "hidden=128": {"attention": {"hidden": 128}},
        "dropout=0": {"attention": {"dropout": 0.0}},
        "dropout=0.5": {"attention": {"dropout": 0.5}},
        "attention epochs=60": {"attention": {"epochs": 60}},
        "attention rate=0.01": {"attention": {"learning-rate": 1e-2}},
        "rate=0.0003": {"generator": {"learning-rate": 3e-4}},
        "rate=0.003": {"generator": {"learning-rate": 3e-3}},
        "rate=0.001": {"generator": {"learning-rate": 1e-3}},
        "rate=0.001 batch=1024": {"generator": {"learning-rate": 1e-3, "batch-size": 1024}},
        "rate=0.03": {"generator": {"learning-rate": 3e-2}},
        "batch=1024": {"generator": {"batch-size": 1024}},
        "tau=0.2": {"generator": {"temperature": 0.2}},
        "tau=0.5": {"generator": {"temperature": 0.5}},
        "tau=1": {"generator": {"temperature": 1.0}},
        "tau=4": {"generator": {"temperature": 4.0}},
        "steps=250": {"generator": {"steps": 250}},
        "steps=1000": {"generator": {"steps": 1000}},
        "steps=2000": {"generator": {"steps": 2000}},
        "candidates=256": {"generator": {"candidates": 256}},
        "candidates=1024": {"generator": {"candidates": 1024}},
    }
    return {name: upc(0.6, 0.5, **change) for name, change in changes.items()}


def noisy_generators() -> dict[str, Setting]:
    """Noisy co-occurrences at epsilon 10, one thing changed at a time."""
    changes: dict[str, dict[str, Any]] = {
        "as shipped": {},
        "items=250": {"items": 250},
        "items=1000": {"items": 1000},
        "clip-items=4": {"clip-items": 4},
        "clip-items=16": {"clip-items": 16},
        "threshold=1": {"threshold": 1.0},
        "threshold=3": {"threshold": 3.0},
        "smoothing=0": {"smoothing": 0.0},
        "smoothing=0.1": {"smoothing": 0.1},
        "smoothing=0.3": {"smoothing": 0.3},
        "smoothing=0.5": {"smoothing": 0.5},
        "popularity": {"smoothing": 1.0},
    }
    shared = {"name": "noisy-cooccurrence", "epsilon": 10.0}
    return {name: {**shared, **change} for name, change in changes.items()}


PERTURBATIONS = {"generator": generators, "noisy-cooccurrence": noisy_generators}


def recommenders(data: str, name: str) -> list[dict[str, Any]]:
    """The grid of a recommender's settings."""
    grid = GRIDS[data, name]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def along(data: str, settings: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """BPR-MF's metrics on validation rows at several numbers of epochs of one training, which ends
    where Recall is `FALLEN` below its best; the last record says so."""
    population = population_of(data, None, seed, "validation")
    tested = tested_users(population, "validation", TESTED[data])
    epochs = EPOCHS[data]
    model = made("bprmf", {**settings, "epochs": max(epochs)}, seed)
    best = 0.0
    started = time.process_time()
    for done in model.training(training_histories(population)):
        if done not in epochs:
            continue
        found = {"bprmf": metrics_of(model, population, tested, "validation", ("both",))}
        recall = found["bprmf"]["both Recall"]
        last = done == max(epochs) or recall < best - FALLEN
        best = max(best, recall)
        seconds = round(time.process_time() - started, 1)
        yield {"settings": settings, "epochs": done, "last": last, "seconds": seconds} | {
            "found": found
        }
        if last:
            return


def measured(data: str, what: str, job: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """The records of a job: one, or one for each number of epochs."""
    if what == "bprmf":
        yield from along(data, job["settings"], seed)
        return
    started = time.process_time()
    if what in PERTURBATIONS:
        models = {"bprmf": MODELS[data]["bprmf"]}
        found = measure(data, job["perturb"], seed, "validation", models)
    else:
        plain = population_of(data, None, seed, "validation")
        models = {what: job["settings"]}
        found = utility(plain, "validation", models, seed, TESTED[data])
    yield {**job, "seconds": round(time.process_time() - started, 1), "found": found}


def jobs(data: str, what: str) -> list[dict[str, Any]]:
    """What is to be measured."""
    if what in PERTURBATIONS:
        named = PERTURBATIONS[what]().items()
        return [{"name": name, "perturb": table} for name, table in named]
    return [{"settings": one} for one in recommenders(data, what)]


def known(job: dict[str, Any], records: list[dict[str, Any]]) -> bool:
    """Whether a job is in the file, and measured to the end of its training."""
    return any(job.items() <= one.items() and one.get("last", True) for one in records)


def shown(records: list[dict[str, Any]]) -> list[str]:
    """A line for each job: mean Recall@20 over seeds, standard deviation, seeds; best first."""
    values: dict[str, list[float]] = {}
    for one in records:
        found = one["found"].get("utility", one["found"])
        name = f"{one['data']} {one['what']} {one.get('name') or one['settings']}"
        name += f" {one['epochs']} epochs" if "epochs" in one else ""
        recall = next(iter(found.values()))["both Recall"]
        values.setdefault(name, []).append(recall)
    ordered = sorted(values.items(), key=lambda pair: -float(np.mean(pair[1])))
    return [
        f"{np.mean(found):.4f} +- {np.std(found, ddof=1) if len(found) > 1 else np.nan:.4f}"
        f" ({len(found)})  {name}"
        for name, found in ordered
    ]


def main() -> None:
    """Measure the missing settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", choices=TESTED, default="office")
    parser.add_argument(
        "--what", default="generator", choices=(*PERTURBATIONS, "bprmf", "neumf", "ease")
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=int, default=10**9, help="largest number of settings to measure"
    )
    parser.add_argument("--show", action="store_true", help="print what is in the file, and stop")
    given = parser.parse_args()
    records = json.loads(given.file.read_text()) if given.file.exists() else []
    if given.show:
        print("\n".join(shown(records)))
        return
    shared = {"data": given.data, "what": given.what, "seed": given.seed}
    done = 0
    for job in jobs(given.data, given.what):
        job_here = {**shared, **job}
        if known(job_here, records):
            continue
        if done == given.limit:
            return
        done += 1
        records = [one for one in records if not job_here.items() <= one.items()]
        for record in measured(given.data, given.what, job, given.seed):
            records.append({**shared, **record})
            given.file.write_text(json.dumps(records, indent=1, default=float) + "\n")
            print(shown(records[-1:])[0], record["seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
