# SPDX-License-Identifier: Apache-2.0
"""What the paper of UPC-SDG leaves open, on validation rows: a tenth of the training file.

    FEDREC_DATA=DATA python benchmarks/upc_sdg_choices.py FILE.json --data office --what neumf

`generator` varies the generator and its attention one thing at a time (k .6, gamma .5) and measures
BPR-MF on what comes out; a recommender's name varies the recommender itself on the original rows.
On Gowalla 3,000 users are tested, the same ones each time. What is in the file is not measured
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.upc_sdg import MODELS, Setting, measure, population_of, upc, utility

TESTED = {"office": None, "gowalla": 3000}
GRIDS: dict[tuple[str, str], dict[str, list[Any]]] = {
    ("gowalla", "bprmf"): {
        "regularisation": [0.05, 0.01, 0.003],
        "epochs": [25, 50, 100],
    },
    ("office", "neumf"): {
        "regularisation": [0.0, 0.003],
        "epochs": [10, 20],
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
    }
    return {name: upc(0.6, 0.5, **change) for name, change in changes.items()}


def recommenders(data: str, name: str) -> list[dict[str, Any]]:
    """The grid of a recommender's settings."""
    grid = GRIDS[data, name]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", choices=TESTED, default="office")
    parser.add_argument("--what", default="generator", choices=("generator", "bprmf", "neumf"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    records = json.loads(given.file.read_text()) if given.file.exists() else []
    plain = None
    if given.what == "generator":
        jobs: list[dict[str, Any]] = [
            {"name": key, "perturb": table} for key, table in generators().items()
        ]
    else:
        jobs = [{"settings": one} for one in recommenders(given.data, given.what)]
    for job in jobs:
        job = {"data": given.data, "what": given.what, "seed": given.seed, **job}
        if any(job.items() <= one.items() for one in records):
            continue
        started = time.process_time()
        if given.what == "generator":
            models = {"bprmf": MODELS[given.data]["bprmf"]}
            found = measure(given.data, job["perturb"], given.seed, "validation", models)
        else:
            plain = plain or population_of(given.data, None, given.seed, "validation")
            models = {given.what: job["settings"]}
            found = utility(plain, "validation", models, given.seed, TESTED[given.data])
        records.append({**job, "seconds": round(time.process_time() - started, 1), "found": found})
        given.file.write_text(json.dumps(records, indent=1, default=float) + "\n")
        print(json.dumps(records[-1], default=float), flush=True)


if __name__ == "__main__":
    main()
