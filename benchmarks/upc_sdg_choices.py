# SPDX-License-Identifier: Apache-2.0
"""What the paper of UPC-SDG leaves open, on validation rows: a tenth of the training file.

    FEDREC_DATA=DATA python benchmarks/upc_sdg_choices.py FILE.json --data office --what neumf

`generator` varies the generator and its attention one thing at a time (k .6, gamma .5) and measures
BPR-MF on what comes out; a recommender's name varies the recommender itself on the original rows.
On Gowalla 1,000 users are tested, the same ones each time. What is in the file is not measured
again. BPR-MF is measured several times while it trains, after the epochs that the grid names.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.upc_sdg import (
    MODELS,
    Setting,
    measure,
    population_of,
    ranked,
    recommender,
    training_histories,
    upc,
    utility,
)

TESTED = {"office": None, "gowalla": 1000}
GRIDS: dict[tuple[str, str], dict[str, list[Any]]] = {
    ("gowalla", "bprmf"): {
        "learning-rate": [0.05, 0.1],
        "regularisation": [0.02, 0.01, 0.005, 0.002],
        "epochs": [25, 50, 100, 200, 400],
    },
    ("office", "ease"): {
        "regularisation": [50.0, 100.0, 200.0, 500.0, 1000.0],
    },
    ("office", "neumf"): {
        "regularisation": [0.0, 0.003, 0.01],
        "factors": [32, 64],
        "epochs": [10, 20, 40],
    },
}


def generators() -> dict[str, Setting]:
    """One thing changed at a time, in the middle of the paper's grid of k and gamma."""
    changes: dict[str, dict[str, Any]] = {
        "as shipped": {},
        "best": {"draw": "best"},
        "beta=0": {"attention": {"beta": 0.0}},
        "rate=0.001": {"generator": {"learning-rate": 1e-3}},
        "tau=1": {"generator": {"temperature": 1.0}},
        "beta=1": {"attention": {"beta": 1.0}},
        "tau=0.2": {"generator": {"temperature": 0.2}},
        "steps=2000": {"generator": {"steps": 2000}},
        "candidates=2048": {"generator": {"candidates": 2048}},
        "batch=1024": {"generator": {"batch-size": 1024}},
        "hidden=32": {"attention": {"hidden": 32}},
        "hidden=128": {"attention": {"hidden": 128}},
        "dropout=0": {"attention": {"dropout": 0.0}},
        "dropout=0.5": {"attention": {"dropout": 0.5}},
        "attention of 5 epochs": {"attention": {"epochs": 5}},
        "attention at 0.01": {"attention": {"learning-rate": 0.01}},
    }
    return {name: upc(0.6, 0.5, **change) for name, change in changes.items()}


def recommenders(data: str, name: str) -> list[dict[str, Any]]:
    """The grid of a recommender's settings."""
    grid = GRIDS[data, name]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def by_epochs(data: str, plain: Any, jobs: list[dict[str, Any]], seed: int) -> Iterator[Any]:
    """BPR-MF after each number of epochs of jobs that differ in nothing else, in one training;
    yields job and figures."""
    after = {job["settings"]["epochs"]: job for job in jobs}
    settings = {**jobs[0]["settings"], "epochs": max(after)}
    model = recommender("bprmf", settings, seed)
    for epoch in model.epochs(training_histories(plain)):
        if epoch in after:
            yield after[epoch], ranked(model, "bprmf", plain, "validation", TESTED[data])


def recommended(data: str, what: str, seed: int, missing: list[dict[str, Any]]) -> Iterator[Any]:
    """Job and figures of the recommender jobs that are missing."""
    plain = population_of(data, None, seed, "validation") if missing else None
    if what != "bprmf":
        for job in missing:
            models = {what: job["settings"]}
            yield job, utility(plain, "validation", models, seed, TESTED[data])
        return
    for _, jobs in itertools.groupby(missing, lambda job: {**job["settings"], "epochs": 0}):
        yield from by_epochs(data, plain, list(jobs), seed)


def generated(data: str, seed: int, missing: list[dict[str, Any]]) -> Iterator[Any]:
    """Job and figures of the generator jobs that are missing, by BPR-MF."""
    models = {"bprmf": MODELS[data]["bprmf"]}
    for job in missing:
        yield job, measure(data, job["perturb"], seed, "validation", models)


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", choices=TESTED, default="office")
    parser.add_argument(
        "--what", default="generator", choices=("generator", *{name for _, name in GRIDS})
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    records = json.loads(given.file.read_text()) if given.file.exists() else []
    about = {"data": given.data, "what": given.what, "seed": given.seed}
    jobs: list[dict[str, Any]] = (
        [{"name": key, "perturb": table} for key, table in generators().items()]
        if given.what == "generator"
        else [{"settings": one} for one in recommenders(given.data, given.what)]
    )
    missing = [
        job for job in jobs if not any({**about, **job}.items() <= r.items() for r in records)
    ]
    found = (
        generated(given.data, given.seed, missing)
        if given.what == "generator"
        else recommended(given.data, given.what, given.seed, missing)
    )
    started = time.process_time()
    for job, figures in found:
        seconds, started = round(time.process_time() - started, 1), time.process_time()
        records.append({**about, **job, "seconds": seconds, "found": figures})
        given.file.write_text(json.dumps(records, indent=1, default=float) + "\n")
        print(json.dumps(records[-1], default=float), flush=True)


if __name__ == "__main__":
    main()
