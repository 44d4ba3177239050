# SPDX-License-Identifier: Apache-2.0
"""Users per second of several simulators on one piece of work, side by side, with equal results checked.

    python benchmarks/simulation.py --cohort 20 --items 3706 --contestants fedrec,flower,loop --repeats 3 --json OUT

Every repeat runs all contestants in turn, each in a process of its own. The first rounds of a run are not counted. A
contestant's figure is the median over its repeats of (cohort / median seconds of a counted round). Memory is the peak
proportional set size of its process tree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.whole_run import descendants, pss_mib  # noqa: E402
from benchmarks.workload import write  # noqa: E402

WARM_UP = 1
TOLERANCE = 1e-4  # relative, of the sum of squared parameters


def command(name: str, work: Path, cohort: int, items: int) -> list[str]:
    """How a contestant is started."""
    ours = ["-m", "benchmarks.contestants.ours", str(work), str(cohort), str(items)]
    modules = {
        "fedrec": [*ours, "ray"],
        "fedrec-serial": [*ours, "serial"],
        "loop": ["-m", "benchmarks.contestants.loop", str(work)],
        "loop-sparse": ["-m", "benchmarks.contestants.loop", str(work), "--sparse"],
        "flower": ["-m", "benchmarks.contestants.stock_flower", str(work)],
    }
    if name not in modules:
        raise SystemExit(f"unknown contestant {name!r}; known: {', '.join(modules)}")
    return [sys.executable, *modules[name]]


def measure(name: str, work: Path, cohort: int, items: int) -> dict[str, Any]:
    """Run one contestant once."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command(name, work, cohort, items), stdout=said, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT
        )
        peak = [0.0]
        watcher = threading.Thread(target=watch, args=(process, peak))
        watcher.start()
        process.wait()
        watcher.join()
        said.seek(0)
        lines = said.read().strip().splitlines()
    if process.returncode or not lines:
        raise SystemExit(f"{name} failed with status {process.returncode}: {' '.join(process.args)}")
    report = json.loads(lines[-1])
    seconds = report["seconds"][WARM_UP:]
    return {
        "users_per_second": cohort / statistics.median(seconds),
        "squared_sum": report["squared_sum"],
        "peak_mib": round(peak[0]),
    }


def watch(process: subprocess.Popen[bytes], peak: list[float]) -> None:
    """Sample the memory of a process tree until it ends."""
    while process.poll() is None:
        peak[0] = max(peak[0], sum(pss_mib(child) for child in descendants(process.pid)))
        time.sleep(0.5)


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the repeats, and whether all ended with the same parameters."""
    sums = [run["squared_sum"] for found in runs.values() for run in found]
    return {
        "users_per_second": {n: statistics.median(r["users_per_second"] for r in found) for n, found in runs.items()},
        "peak_mib": {name: max(run["peak_mib"] for run in found) for name, found in runs.items()},
        "equal_results": max(sums) - min(sums) <= TOLERANCE * max(sums),
        "squared_sums": {name: found[0]["squared_sum"] for name, found in runs.items()},
    }


def main() -> None:
    """Run the contestants in turn, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohort", type=int, default=20, help="users per round")
    parser.add_argument("--items", type=int, default=3706, help="size of the catalogue")
    parser.add_argument("--rounds", type=int, default=6, help="rounds per run, the first of them not counted")
    parser.add_argument("--contestants", default="fedrec,fedrec-serial,loop,loop-sparse,flower")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    names = given.contestants.split(",")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.npz"
        write(work, given.cohort, given.items, given.rounds)
        for repeat in range(given.repeats):
            for name in names:
                runs[name].append(measure(name, work, given.cohort, given.items))
                print(f"{repeat + 1}/{given.repeats} {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    found = summary(runs)
    first = found["users_per_second"][names[0]]
    print(f"M={given.cohort}, {given.items:,} items, {given.repeats} repeats; equal results: {found['equal_results']}")
    for name in names:
        speed = found["users_per_second"][name]
        print(f"{name:15s} {speed:8.1f} users/s  {names[0]} is {first / speed:6.2f}x  {found['peak_mib'][name]:6d} MiB")
    if given.json:
        given.json.write_text(json.dumps({**vars(given), "json": str(given.json), **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
