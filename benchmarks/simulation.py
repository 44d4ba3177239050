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

pfl and FedJAX need environments of their own: `make benchmark-venvs`;
`FEDREC_BENCHMARK_VENVS` may name the folder that holds them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.contestants.ours import write  # noqa: E402
from benchmarks.processes import GpuWatch, TreeWatch, child_environment  # noqa: E402

WARM_UP = 1
MEMORY_ROUNDS = 3
SUM_TOLERANCE = 1e-4  # relative, of the sum of squared parameters after all rounds
# Relative, of the squared norm of the change in one round. One ReLU that rounding turned over, in
# one user, made 2e-4; another order of the batches makes 2e-2.
CHANGE_TOLERANCE = 2e-3

VENVS = ROOT / "benchmarks" / ".venvs"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
HOME = "benchmarks.contestants"


@dataclass(frozen=True)
class Task:
    """What all contestants do.

    Attributes:
        work: path of the archive.
        cohort: users per round.
        items: size of the catalogue.
        device: `cpu` or `cuda`.
        memory_gib: what fedrec may use for the users that it trains at once.
        clip: L2 norm that each user's update is clipped to; 0: none.
    """

    work: str
    cohort: int
    items: int
    device: str = "cpu"
    memory_gib: float = 1.0
    clip: float = 0.0


def commands(task: Task) -> dict[str, tuple[str, list[str]]]:
    """Contestant -> its environment ("" for fedrec's own) and the arguments of that environment's
    Python."""
    work = task.work
    where = [task.device, str(task.memory_gib)]
    ours = ["-m", f"{HOME}.ours", work, str(task.cohort), str(task.items)]
    loop = ["-m", f"{HOME}.loop", work, task.device]
    on_both = {
        "fedrec": ("", [*ours, "ray", *where]),
        "fedrec-serial": ("", [*ours, "serial", *where]),
        "loop": ("", loop),
        "loop-sparse": ("", [*loop, "--sparse"]),
    }
    if task.device != "cpu":
        return on_both
    pfl = ["-m", f"{HOME}.pfl_research", work]
    fedjax = ["-m", f"{HOME}.fedjax_clients", work]
    return {
        **on_both,
        "flower": ("", ["-m", f"{HOME}.stock_flower", work]),
        "pfl": ("pfl", [*TORCHRUN, *pfl]),
        "pfl-sparse": ("pfl", [*TORCHRUN, *pfl, "--sparse"]),
        "pfl-1": ("pfl", pfl),
        "pfl-1-sparse": ("pfl", [*pfl, "--sparse"]),
        "fedjax": ("fedjax", [*fedjax, "pmap"]),
        "fedjax-jit": ("fedjax", [*fedjax, "jit"]),
    }


def command(name: str, task: Task) -> list[str]:
    """The command line of one contestant. Ends the program when it is unknown or its environment is
    missing."""
    known = commands(task)
    if name not in known:
        raise SystemExit(f"unknown contestant {name!r} on {task.device}; known: {', '.join(known)}")
    environment, arguments = known[name]
    return [interpreter(environment), *arguments]


def interpreter(environment: str) -> str:
    """The Python of a contestant's environment."""
    if not environment:
        return sys.executable
    python = Path(os.environ.get("FEDREC_BENCHMARK_VENVS", VENVS)) / environment / "bin" / "python"
    if not python.exists():
        raise SystemExit(
            f"no environment for {environment}: {python} is not there; make it with `make"
            " benchmark-venvs`, or let FEDREC_BENCHMARK_VENVS name the folder that holds it"
        )
    return str(python)


def measure(name: str, task: Task, memory: bool = False) -> dict[str, Any]:
    """Run one contestant once; with its memory instead of its speeds, or with neither when no round
    is counted."""
    environment = child_environment(RAY_USAGE_STATS_ENABLED="0", FLWR_TELEMETRY_ENABLED="0")
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        line = command(name, task)
        process = subprocess.Popen(line, stdout=output, stderr=errors, env=environment, cwd=ROOT)
        watch = TreeWatch(process, memory)
        busy = GpuWatch(task.device)
        watch.start()
        process.wait()
        watch.join()
        busy.stop()
        output.seek(0)
        errors.seek(0)
        lines = output.read().strip().splitlines()
        trouble = errors.read().strip().splitlines()
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
    short = written(task, folder, "one-round", 1)
    return {name: measure(name, short)["squared_change"] for name in names}


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
    sums = [run["squared_sum"] for repeats in runs.values() for run in repeats]
    medians = {}
    for kind in ("users_per_second", "users_per_cpu_second", "gpu_busy"):
        numbers = {name: [run[kind] for run in runs[name] if kind in run] for name in runs}
        if all(numbers.values()):
            medians[kind] = {name: statistics.median(numbers[name]) for name in runs}
    return {
        **medians,
        "peak_mib": peaks,
        "equal_results": alike(sums, SUM_TOLERANCE) and alike(changes.values(), CHANGE_TOLERANCE),
        "squared_sums": {name: repeats[0]["squared_sum"] for name, repeats in runs.items()},
        "squared_changes_of_one_round": changes,
    }


def main() -> None:
    """Run the contestants in turn, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cohort", type=int, default=20, help="users per round")
    parser.add_argument("--items", type=int, default=3706, help="size of the catalogue")
    parser.add_argument("--rounds", type=int, default=6, help="of a run; the first does not count")
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
    parser.add_argument("--no-memory", action="store_true", help="skip the run that measures it")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    if not 0 <= given.clip < float("inf"):
        parser.error(f"--clip: expected a norm > 0, or 0 for none, got {given.clip}")
    names = given.contestants.split(",")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    note = partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        task = Task("", given.cohort, given.items, given.device, given.memory_gib, given.clip)
        for name in names:
            command(name, task)  # ends here when one is unknown or not installed
        changes = check(names, Path(folder), task)
        note(f"squared change in one round: {changes}")
        peaks = {} if given.no_memory else memory(names, Path(folder), task, given.rounds)
        note(f"peak MiB: {peaks}")
        task = written(task, Path(folder), "work", given.rounds)
        for repeat in range(given.repeats):
            for name in names:
                runs[name].append(measure(name, task))
                note(f"{repeat + 1}/{given.repeats} {name}: {runs[name][-1]}")
    table = summary(runs, changes, peaks)
    first = table["users_per_second"][names[0]]
    print(
        f"M={given.cohort}, {given.items:,} items, {given.repeats} repeats; equal results:"
        f" {table['equal_results']}"
    )
    for name in names:
        speed = table["users_per_second"][name]
        per_cpu = table["users_per_cpu_second"][name]
        print(
            f"{name:15s} {speed:8.1f} users/s  {names[0]} is {first / speed:6.2f}x  "
            f"{per_cpu:8.1f} users/CPU s"
            + (f"  {table['peak_mib'][name]:6d} MiB" if name in table["peak_mib"] else "")
            + (f"  GPU busy {table['gpu_busy'][name]:4.0%}" if "gpu_busy" in table else "")
        )
    if given.json:
        report = {**vars(given), "json": str(given.json), **table, "runs": runs}
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
