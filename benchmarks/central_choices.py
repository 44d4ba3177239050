# SPDX-License-Identifier: Apache-2.0
"""Settings of centralised systems, compared on validation rows or users.

    python -m benchmarks.central_choices FILE.json central-ml100k --only ials [--minutes 10]
    python -m benchmarks.central_choices FILE.json central-ml100k --only ials --show

A system's grid is a list of products; what is in the file is not measured again. On MovieLens-100K
the validation part of the split is ranked, on MovieLens-1M a fifth of the users, who are taken from
the training users (`split.validation-users`). Nothing of the test part is looked at.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

from fedrec.baselines.protocol import RankingProtocol, make_baseline
from fedrec.data.cache import POPULATIONS
from fedrec.experiment.loading import load
from fedrec.runtime.atomic_files import write_atomically

Grid = list[dict[str, list[Any]]]
Record = dict[str, Any]

OVERRIDES = {"central-ml100k": [], "central-ml1m": ["split.validation-users=0.2"]}
CRITERION = {"central-ml100k": "ndcg-list@100", "central-ml1m": "hits@10"}
"""What a setting is chosen by."""
SIMILAR = {"metric": ["cosine", "pearson"], "shrinkage": [0.0, 10.0, 50.0]}
SLOW = {"epochs": [15], "average": [0.999], "learning-rate": [0.001]}
FAST = {"epochs": [15], "average": [0.999], "learning-rate": [0.003]}
GRIDS: dict[tuple[str, str], Grid] = {
    ("central-ml100k", "ease"): [{"regularisation": [50.0, 100.0, 200.0, 300.0, 500.0, 1000.0]}],
    ("central-ml100k", "puresvd"): [{"factors": [8, 12, 16, 20, 24, 32, 48]}],
    ("central-ml100k", "item-knn"): [{"neighbours": [20, 50, 100, 200, 400], **SIMILAR}],
    ("central-ml100k", "user-knn"): [
        {"neighbours": [20, 40, 60, 80, 120, 200], **SIMILAR},
        {"neighbours": [20, 40, 80, 120, 200], "metric": ["euclidean"]},
    ],
    ("central-ml100k", "ials"): [
        {
            "factors": [16, 24, 32, 48, 64],
            "weight": [4.0, 8.0, 16.0],
            "regularisation": [5.0, 10.0, 20.0, 40.0],
        }
    ],
    ("central-ml100k", "warp"): [
        {"factors": [10, 20, 40], "epochs": [20, 30, 50], "max-sampled": [10, 30]},
        {"factors": [10, 20], "epochs": [30, 60], "learning-rate": [0.02]},
    ],
    ("central-ml1m", "item-knn"): [{"neighbours": [20, 50, 100, 200], **SIMILAR}],
    ("central-ml1m", "user-knn"): [
        {"neighbours": [50, 100, 200, 400], **SIMILAR},
        {"neighbours": [20, 30, 40]},
    ],
    ("central-ml1m", "puresvd"): [{"factors": [24, 32, 40, 50, 64, 80, 100]}],
    ("central-ml1m", "bprmf"): [
        {
            "factors": [64, 128],
            "epochs": [50, 100, 200],
            "regularisation": [0.01, 0.02, 0.05],
        },
        {"factors": [128], "epochs": [100], "regularisation": [0.02], "learning-rate": [0.1]},
    ],
    ("central-ml1m", "mf"): [
        {"factors": [128], "regularisation": [0.005], **SLOW},
        {"factors": [64, 128], "regularisation": [0.02], **FAST},
    ],
    ("central-ml1m", "gmf"): [
        {"factors": [64], "regularisation": [0.02], **rate} for rate in (SLOW, FAST)
    ]
    + [{"factors": [64, 128], "regularisation": [0.005, 0.01], **rate} for rate in (SLOW, FAST)],
    ("central-ml1m", "warp"): [
        {"factors": [10, 20, 40, 80], "epochs": [30], "max-sampled": [10, 30]},
        {"factors": [40], "epochs": [60], "max-sampled": [30], "learning-rate": [0.02, 0.05]},
    ],
}


def settings_of(experiment: str, name: str) -> list[dict[str, Any]]:
    """All settings of a system's grid."""
    return [
        dict(zip(grid, values, strict=True))
        for grid in GRIDS[experiment, name]
        for values in itertools.product(*grid.values())
    ]


def measured(protocol: RankingProtocol, name: str, settings: dict[str, Any], seed: int) -> Record:
    """One setting: means of the metrics over users, their standard errors, seconds of CPU."""
    started = time.process_time()
    baseline = make_baseline(name, settings, seed=seed)
    protocol.fit(baseline)
    columns = protocol.rank(baseline)
    found = {metric: float(column.nanmean()) for metric, column in columns.items()}
    errors = {
        metric: float(column[~column.isnan()].std() / (~column.isnan()).sum() ** 0.5)
        for metric, column in columns.items()
    }
    return {
        "settings": settings,
        "metrics": found,
        "errors": errors,
        "cpu": round(time.process_time() - started, 1),
    }


def fill(file: Path, experiment: str, name: str, seed: int, minutes: float) -> bool:
    """Measure what is missing; whether all of it is there now.

    Args:
        file: the records, by experiment, system and seed.
        experiment: whose data and split are taken.
        name: the system.
        seed: of the split and of the system.
        minutes: after so many no further setting is begun.
    """
    started = time.monotonic()
    protocol = None
    for settings in settings_of(experiment, name):
        table = read(file)
        records = table.setdefault(f"{experiment} {name} {seed}", [])
        if any(one["settings"] == settings for one in records):
            continue
        if time.monotonic() - started > 60 * minutes:
            return False
        if protocol is None:
            loaded = load(experiment, [*OVERRIDES[experiment], f"seed={seed}"])
            population = POPULATIONS.population(loaded)
            ks = loaded.evaluation.ks
            protocol = RankingProtocol(population, held_out="validation", ks=ks)
        records.append(measured(protocol, name, settings, seed))
        write_atomically(file, json.dumps(table, indent=1).encode())
    return True


def read(file: Path) -> dict[str, list[Record]]:
    """What was found so far."""
    return json.loads(file.read_text()) if file.exists() else {}


def shown(experiment: str, records: list[Record]) -> list[str]:
    """A line for each setting: the criterion with its standard error over users, seconds of CPU;
    best first."""
    metric = CRITERION[experiment]
    ordered = sorted(records, key=lambda one: -one["metrics"][metric])
    return [
        f"{metric} {one['metrics'][metric]:.4f} +- {one['errors'][metric]:.4f}"
        f"  {one['cpu']:.1f} s  {one['settings']}"
        for one in ordered
    ]


def main() -> None:
    """See the module's head."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("experiment", choices=OVERRIDES)
    parser.add_argument("--only", required=True, help="the system")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--show", action="store_true", help="print what is in the file, and stop")
    given = parser.parse_args()
    if (given.experiment, given.only) not in GRIDS:
        names = ", ".join(name for experiment, name in GRIDS if experiment == given.experiment)
        raise SystemExit(f"no grid for {given.only!r} on {given.experiment}; there are: {names}")
    if given.show:
        records = read(given.file).get(f"{given.experiment} {given.only} {given.seed}", [])
        print("\n".join(shown(given.experiment, records)))
    elif not fill(given.file, given.experiment, given.only, given.seed, given.minutes):
        raise SystemExit("time is up; the same command goes on")


if __name__ == "__main__":
    main()
