# SPDX-License-Identifier: Apache-2.0
"""How much the settings that PNBM's study did not search matter: one changed at a time around the
chosen ones, RMSE on validation rows of fold 1.

    FEDREC_DATA=DATA python -m benchmarks.pnbm_choices FILE.json --systems dpps-mf

Validation rows are a tenth of fold 1's training rows, as in `benchmarks/pnbm.py`; seeds 1000 to
1002 draw starts, batches and noise, and for `pnbm-sound` the validation rows too. What is in the
file is not measured again; at the end it is printed as a table, means over seeds.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pnbm import SCREEN, measured
from fedrec.errors import ExperimentError

SEEDS = (1000, 1001, 1002)
Settings = dict[str, Any]

_MEANS = {"clip-norm": 3.0, "damping": 10.0}
_FEDERATED = {
    "items": 400,
    "rank": 1,
    "means-share": 3.0,
    "similarity-clip-norm": 0.3,
    "rounds": 4,
    "prior": 5.0,
}
_FACTORS = {"temperature": 1e-4, "steps": 300, "own-regularisation": 10.0, "learning-rate": 10.0}
CHOSEN: dict[str, dict[float, Settings]] = {
    "dpsgd-pnbm": {
        epsilon: {
            "sample": sample,
            "iterations": 1,
            "learning-rate": 0.4,
            "rescale": 10.0,
            "floor": 15.0,
        }
        for epsilon, sample in ((1.0, 0.05), (20.0, 1.0))
    },
    "dpps-pnbm": {20.0: {"learning-rate": 8e-6, "temperature": 0.09, "steps": 30}},
    "dpps-mf": {5.0: _FACTORS, 20.0: _FACTORS},
    "pnbm-sound": {
        1.0: {**_FEDERATED, "clip-norm": 3.0, "damping": 250.0, "server-lr": 30.0},
        10.0: {**_FEDERATED, **_MEANS, "server-lr": 300.0},
        20.0: {**_FEDERATED, **_MEANS, "clip-norm": 6.0, "server-lr": 300.0},
    },
}
"""The settings of the study, by system and nominal epsilon."""
VARIED: dict[str, dict[str, list[Any]]] = {
    "dpsgd-pnbm": {
        "neighbours": [500],
        "start": ["constant"],
        "regularisation": [0.05],
    },
    "dpps-pnbm": {
        "neighbours": [500],
        "batch": [1000, 50_000],
        "decay": [0.0, 0.6],
        "steps": [300],
        "start": ["constant"],
    },
    "dpps-mf": {
        "factors": [5, 15, 20],
        "regularisation": [0.002, 0.2],
        "own-regularisation": [5.0, 20.0, 40.0],
        "batch": [1000, 50_000],
        "decay": [0.0, 0.6],
        "steps": [100, 1000],
    },
    "pnbm-sound": {
        "similarity-clip-norm": [0.1, 1.0],
        "rounds": [2, 8],
        "prior": [2.0, 10.0],
        "means-share": [10.0, 30.0],
        "items": [100, 1000],
        "rank": [4],
    },
}
"""What is changed, one at a time."""


def jobs(systems: list[str]) -> Iterator[tuple[str, float, Settings, int]]:
    """System, nominal epsilon, what is changed, and seed."""
    for system in systems:
        changes: list[Settings] = [{}]
        changes += [{key: one} for key, values in VARIED[system].items() for one in values]
        for epsilon in CHOSEN[system]:
            for change in changes:
                for seed in SEEDS:
                    yield system, epsilon, change, seed


def error(system: str, epsilon: float, change: Settings, seed: int) -> float:
    """RMSE on the validation rows; infinite where training diverged."""
    settings = {**CHOSEN[system][epsilon], **change}
    try:
        return measured(system, settings, epsilon, SCREEN, seed, "validation")["rmse"]
    except ExperimentError:
        return math.inf


def shown(records: list[dict[str, Any]]) -> list[str]:
    """A line for each change: mean over seeds, and its mean difference to the chosen settings with
    the standard deviation of that, paired by seed."""
    found: dict[tuple[str, float, str], dict[int, float]] = {}
    for one in records:
        key = (one["system"], one["epsilon"], json.dumps(one["change"]))
        found.setdefault(key, {})[one["seed"]] = one["rmse"]
    lines = []
    for (system, epsilon, change), errors in found.items():
        base = found.get((system, epsilon, "{}"), {})
        paired = [value - base[seed] for seed, value in errors.items() if seed in base]
        spread = np.std(paired, ddof=1) if len(paired) > 1 else np.nan
        lines.append(
            f"{system} {epsilon:g} {change}: {np.mean(list(errors.values())):.4f},"
            f" {np.mean(paired) if paired else np.nan:+.4f} ± {spread:.4f} ({len(errors)})"
        )
    return lines


def main() -> None:
    """Measure what is missing, then print all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--systems", nargs="+", choices=tuple(VARIED), default=list(VARIED))
    parser.add_argument(
        "--limit", type=int, default=10**9, help="measure at most so many, and stop"
    )
    given = parser.parse_args()
    logging.getLogger("fedrec").setLevel(logging.ERROR)
    records = json.loads(given.file.read_text()) if given.file.exists() else []
    done = 0
    for system, epsilon, change, seed in sorted(jobs(given.systems), key=lambda one: one[-1]):
        job = {"system": system, "epsilon": epsilon, "change": change, "seed": seed}
        if any(job.items() <= one.items() for one in records):
            continue
        if done == given.limit:
            break
        done += 1
        records.append({**job, "rmse": error(system, epsilon, change, seed)})
        given.file.write_text(json.dumps(records, indent=1) + "\n")
    print("\n".join(shown(records)))


if __name__ == "__main__":
    main()
