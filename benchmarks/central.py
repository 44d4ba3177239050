# SPDX-License-Identifier: Apache-2.0
"""Tables of centralised systems over seeds: one JSON file, filled system by system.

    python -m benchmarks.central run FILE.json central-ml1m [--only LABEL]... [--seeds 0 1 2]
    python -m benchmarks.central table FILE.json central-ml1m --metrics hits@5 hits@10

Every system is a separate experiment, in a temporary folder. What is in the file is not run again,
so that a broken table goes on where it stopped. The table has means over the seeds, and 95 per cent
intervals of them by Student's t; with a single seed there is none, and the interval over users that
is printed beside says how far one split of users decides.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fedrec.experiment.loading import load
from fedrec.runtime.atomic_files import write_atomically
from simulations import runner

Table = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Experiment -> label -> seed -> what was found."""


def measured(experiment: str, label: str, seed: int) -> dict[str, Any]:
    """One system of an experiment: its metrics, standard errors over users, and seconds."""
    options = dict(load(experiment).evaluation.baseline_settings()[label])
    named = {"name": label, **options, "label": label}
    baseline = ", ".join(f"{key} = {_toml(value)}" for key, value in named.items())
    overrides = [f"evaluation.baselines=[{{{baseline}}}]", f"seed={seed}"]
    started = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = runner.run(experiment, overrides, output=Path(folder) / "run")
    users = next(iter(result.baseline_users.values()))
    return {
        "metrics": next(iter(result.baselines.values())),
        "errors": dict(users.sem().items()),
        "wall": round(time.perf_counter() - started[0], 1),
        "cpu": round(time.process_time() - started[1], 1),
    }


def fill(file: Path, experiment: str, labels: Sequence[str], seeds: Sequence[int]) -> None:
    """Run the missing parts, seed by seed."""
    known = list(load(experiment).evaluation.baseline_settings())
    unknown = sorted(set(labels) - set(known))
    if unknown:
        raise SystemExit(f"{experiment} has no system {unknown[0]!r}; known: {', '.join(known)}")
    for seed in seeds:
        for label in labels or known:
            table = read(file)
            found = table.setdefault(experiment, {}).setdefault(label, {})
            if str(seed) in found:
                continue
            found[str(seed)] = measured(experiment, label, seed)
            write_atomically(file, json.dumps(table, indent=1).encode())
            print(label, seed, found[str(seed)]["metrics"], found[str(seed)]["cpu"], flush=True)


def read(file: Path) -> Table:
    """What was found so far."""
    return json.loads(file.read_text()) if file.exists() else {}


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 per cent interval of a mean over seeds; NaN for one seed."""
    if len(values) < 2:
        return math.nan
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(stats.t.ppf(0.975, len(values) - 1)) * spread


def rows(found: dict[str, dict[str, dict[str, Any]]], metrics: Sequence[str]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [
        f"| system | seeds | {' | '.join(metrics)} | CPU s |",
        "|---" * (len(metrics) + 3) + "|",
    ]
    for label, seeds in found.items():
        cells = []
        for metric in metrics:
            values = [one["metrics"][metric] for one in seeds.values()]
            half = interval(values)
            if math.isnan(half):
                error = 1.96 * next(iter(seeds.values()))["errors"][metric]
                cells.append(f"{np.mean(values):.3f} (users: ± {error:.3f})")
            else:
                cells.append(f"{np.mean(values):.3f} ± {half:.3f}")
        seconds = np.mean([one["cpu"] for one in seeds.values()])
        lines.append(f"| `{label}` | {len(seeds)} | {' | '.join(cells)} | {seconds:.0f} |")
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def main() -> None:
    """See the module's head."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "table"):
        command = commands.add_parser(name)
        command.add_argument("file", type=Path)
        command.add_argument("experiment")
    commands.choices["run"].add_argument("--only", action="append", default=[])
    commands.choices["run"].add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    commands.choices["table"].add_argument("--metrics", nargs="+", required=True)
    given = parser.parse_args()
    if given.command == "run":
        fill(given.file, given.experiment, given.only, given.seeds)
    else:
        print("\n".join(rows(read(given.file)[given.experiment], given.metrics)))


if __name__ == "__main__":
    main()
