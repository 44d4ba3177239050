# SPDX-License-Identifier: Apache-2.0
"""Users per second of several simulators on one piece of work, side by side, with equal results
checked.

    python benchmarks/simulation.py --cohort 100 --items 3706 --repeats 3 --json OUT \\
        --contestants fedrec,flower,pfl,fedjax,loop

First all contestants do one round, and must change the parameters by the same squared norm: this
tells another order of the examples from rounding, which grows over more rounds. Then every repeat
runs all contestants in turn, each in a process of its own. The first round of a run is not counted:
it holds the starting of workers and, for FedJAX, all compilation (every batch has one padded shape,
so nothing is compiled later).

A contestant's figures are medians over its repeats: of cohort / median seconds of a counted round,
and of users per CPU second (user and system time of the whole process tree) from the begin of the
first counted round to the end of the last. Memory is the largest proportional set size of the
process tree, start included, in one more run of at most three rounds that is not clocked, because
measuring memory slows down the measured processes.

With `--clip S` every contestant clips each user's whole update to the L2 norm S before adding it
up, as in user-level differential privacy, each with its own implementation.

With `--device cuda` fedrec and the loops compete on one GPU. How much of the time it was busy is
what nvidia-smi says five times a second, in the counted rounds.

pfl and FedJAX need environments of their own: `make benchmark-venvs`, see
`contestants/commands.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.contestants.commands import Task, command  # noqa: E402
from benchmarks.environment import child_environment  # noqa: E402
from benchmarks.watch import GpuWatch, TreeWatch  # noqa: E402
from benchmarks.workload import write  # noqa: E402

WARM_UP = 1
MEMORY_ROUNDS = 3
SUM_TOLERANCE = 1e-4  # relative, of the sum of squared parameters after all rounds
# Relative, of the squared norm of the change in one round. One ReLU that rounding turned over, in
# one user, made 2e-4; another order of the batches makes 2e-2.
CHANGE_TOLERANCE = 2e-3


def measure(name: str, task: Task, memory: bool = False) -> dict[str, Any]:
    """Run one contestant once; with its memory instead of its speeds, or with neither when no round
    is counted."""
    environment = child_environment(RAY_USAGE_STATS_ENABLED="0", FLWR_TELEMETRY_ENABLED="0")
    with (
        tempfile.TemporaryFile("w+") as said,
        tempfile.TemporaryFile("w+", errors="replace") as complained,
    ):
        line = command(name, task)
        process = subprocess.Popen(line, stdout=said, stderr=complained, env=environment, cwd=ROOT)
        watch = TreeWatch(process, memory)
        busy = GpuWatch(task.device)
        watch.start()
        process.wait()
        watch.join()
        busy.stop()
        said.seek(0)
        complained.seek(0)
        lines = said.read().strip().splitlines()
        trouble = complained.read().strip().splitlines()
    if process.returncode or not lines:
        raise SystemExit(
            "\n".join([*trouble[-20:], f"{name} failed with status {process.returncode}: {line}"])
        )
    report = json.loads(lines[-1])
    counted = report.pop("rounds")[WARM_UP:]
    if memory:
        return {**report, "peak_mib": round(watch.peak_mib)}
    return {**report, **(figures(counted, task.cohort, watch, busy) if counted else {})}


def figures(
    counted: list[tuple[float, float]], cohort: int, watch: TreeWatch, busy: GpuWatch
) -> dict[str, float]:
    """Speed by wall clock and by CPU time; on a GPU, the share of the time that it was busy."""
    begin = counted[0][0]
    end = counted[-1][1]
    return {
        "users_per_second": cohort / statistics.median(end - begin for begin, end in counted),
        "users_per_cpu_second": cohort * len(counted) / watch.cpu_seconds(begin, end),
        **busy.figures(begin, end),
    }


def written(task: Task, folder: Path, name: str, rounds: int) -> Task:
    """The task with an archive of so many rounds."""
    path = folder / f"{name}.npz"
    write(path, task.cohort, task.items, rounds, task.clip)
    return replace(task, work=str(path))


def check(names: list[str], folder: Path, task: Task) -> dict[str, float]:
    """Contestant -> squared norm of the parameters' change in one round."""
    one = written(task, folder, "one-round", 1)
    return {name: measure(name, one)["squared_change"] for name in names}


def memory(names: list[str], folder: Path, task: Task, rounds: int) -> dict[str, int]:
    """Contestant -> largest memory of its process tree, MiB."""
    few = written(task, folder, "memory", min(rounds, MEMORY_ROUNDS))
    return {name: measure(name, few, memory=True)["peak_mib"] for name in names}


def alike(values: Collection[float], tolerance: float) -> bool:
    """Whether positive figures agree but for a relative difference."""
    return max(values) - min(values) <= tolerance * max(values)


def summary(
    runs: dict[str, list[dict[str, Any]]], changes: dict[str, float], peaks: dict[str, int]
) -> dict[str, Any]:
    """Medians over the repeats, memory, and whether all did the same work."""
    sums = [run["squared_sum"] for found in runs.values() for run in found]
    speeds = {
        kind: {name: statistics.median(run[kind] for run in found) for name, found in runs.items()}
        for kind in ("users_per_second", "users_per_cpu_second")
    }
    busy = {
        name: [run["gpu_busy"] for run in found if "gpu_busy" in run]
        for name, found in runs.items()
    }
    return {
        **speeds,
        **(
            {"gpu_busy": {name: statistics.median(own) for name, own in busy.items()}}
            if all(busy.values())
            else {}
        ),
        "peak_mib": peaks,
        "equal_results": alike(sums, SUM_TOLERANCE) and alike(changes.values(), CHANGE_TOLERANCE),
        "squared_sums": {name: found[0]["squared_sum"] for name, found in runs.items()},
        "squared_changes_of_one_round": changes,
    }


def main() -> None:
    """Run the contestants in turn, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cohort", type=int, default=20, help="users per round")
    parser.add_argument("--items", type=int, default=3706, help="size of the catalogue")
    parser.add_argument(
        "--rounds", type=int, default=6, help="rounds per run, the first of them not counted"
    )
    parser.add_argument("--contestants", default="fedrec,fedrec-serial,loop,loop-sparse,flower")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: fedrec and the loops only"
    )
    parser.add_argument(
        "--memory-gib", type=float, default=1.0, help="for the users that fedrec trains at once"
    )
    parser.add_argument(
        "--clip", type=float, default=0.0, help="clip each user's whole update to this L2 norm"
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="skip the additional run that measures memory"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    if not 0 <= given.clip < float("inf"):
        parser.error(f"--clip: expected a norm > 0, or 0 for none, got {given.clip}")
    names = given.contestants.split(",")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        task = Task("", given.cohort, given.items, given.device, given.memory_gib, given.clip)
        for name in names:
            command(name, task)  # ends here when one is unknown or not installed
        changes = check(names, Path(folder), task)
        print(f"squared change in one round: {changes}", file=sys.stderr, flush=True)
        peaks = {} if given.no_memory else memory(names, Path(folder), task, given.rounds)
        print(f"peak MiB: {peaks}", file=sys.stderr, flush=True)
        task = written(task, Path(folder), "work", given.rounds)
        for repeat in range(given.repeats):
            for name in names:
                runs[name].append(measure(name, task))
                print(
                    f"{repeat + 1}/{given.repeats} {name}: {runs[name][-1]}",
                    file=sys.stderr,
                    flush=True,
                )
    found = summary(runs, changes, peaks)
    first = found["users_per_second"][names[0]]
    print(
        f"M={given.cohort}, {given.items:,} items, {given.repeats} repeats; equal results:"
        f" {found['equal_results']}"
    )
    for name in names:
        speed = found["users_per_second"][name]
        per_cpu = found["users_per_cpu_second"][name]
        print(
            f"{name:15s} {speed:8.1f} users/s  {names[0]} is {first / speed:6.2f}x  "
            f"{per_cpu:8.1f} users/CPU s"
            + (f"  {found['peak_mib'][name]:6d} MiB" if name in found["peak_mib"] else "")
            + (f"  GPU busy {found['gpu_busy'][name]:4.0%}" if "gpu_busy" in found else "")
        )
    if given.json:
        given.json.write_text(
            json.dumps({**vars(given), "json": str(given.json), **found, "runs": runs}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
