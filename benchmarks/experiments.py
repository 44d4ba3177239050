# SPDX-License-Identifier: Apache-2.0
"""Every shipped federated experiment: users per second in training on one thread, beside a plain
PyTorch loop, and the processor time of its whole command.

    FEDREC_DATA=DATA python benchmarks/experiments.py [--only privrec-ml1m,mf-ml1m] \\
        [--without speeds | --without command] [--repeats 3] [--json OUT]

Speeds, a line for each local step of each experiment in `simulations/experiments`: fedrec's path
that is taken, and the loop in `contestants/shipped_loop.py`, in turn, each in a process of its own,
with the experiment's own settings. Users per second are those of the median round over all repeats,
the first round of a process not counted. Both also do one round of one epoch, and `difference` is
how far apart their sums of updates are: the L2 norm of the difference over the norm, all parameters
together. It takes one epoch because rounding grows with the epochs, fastest where learning rates
are high. Steps with parameters that a server generates (meta-MF, GPFedRec, FedGNN) are timed in
whole runs on the serial engine, and the loop beside them is fedrec's own `reference` path.

`evaluation` is the time of the evaluation at the end of a run, all test users without and with
fine-tuning. `MiB` is the largest resident memory of the process with fedrec's path, which trains a
few rounds of 40 users and, for an experiment's own step, evaluates. `command` is the processor time
of `fedrec run EXPERIMENT` on the serial engine with one thread, in the first line of an experiment.

OUT is written after each measurement. Measurements that it has already are printed and not
repeated, so the same command continues an interrupted table.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.contestants.shipped import (  # noqa: E402
    initial,
    node_of,
    orders,
    section_of,
    trained,
)
from benchmarks.contestants.shipped_loop import rounds_of  # noqa: E402
from benchmarks.processes import child_environment  # noqa: E402
from clients.step import Step  # noqa: E402
from fedrec.experiment.loading import load, shipped_experiments  # noqa: E402
from fedrec.runtime.files import read_json, write_atomically  # noqa: E402

USERS = 40
ROUNDS = 6
LOOP_USERS = 20
LOOP_ROUNDS = 2
GENERATED_ROUNDS = 6
COLUMNS = {
    "speeds": (
        ("path", "path", ""),
        ("users/s", "users_per_second", ".4g"),
        ("loop", "loop", ".3g"),
        ("ratio", "ratio", ".1f"),
        ("difference", "difference", ".0e"),
        ("evaluation, s", "evaluation", ".1f"),
        ("MiB", "peak_mib", ".0f"),
    ),
    "command": (("command, s", "seconds", ".1f"),),
}
"""Columns by what measures them: their titles, keys and formats."""

Measurements = dict[str, dict[str, Any]]
"""Measurements of a line, by the groups of columns."""


def steps_of(name: str) -> dict[str, Step]:
    """The steps of an experiment that train several clients at once, or clients with parameters
    that the server generates."""
    node = node_of(name, "auto")
    names = dict.fromkeys(section.name for section in node.experiment.steps().values())
    steps = {step: node.step(section_of(node, step)) for step in names}
    return {
        name: step
        for name, step in steps.items()
        if step.generated or step.draw() or type(step).batches is not Step.batches
    }


def difference(name: str, step: str) -> float:
    """How far fedrec and the loop are apart after one round of one epoch, relative to how far they
    went."""
    node = node_of(name, "auto")
    (order,) = orders(node, step, LOOP_USERS, 1, epochs=1)
    _, ours = trained(node, initial(node), order)
    ((_, theirs),) = rounds_of(name, step, LOOP_USERS, 1, epochs=1)
    shared = [key for key in theirs if np.any(theirs[key])]
    apart = sum(float(np.square(ours[key].astype(float) - theirs[key]).sum()) for key in shared)
    return (apart / sum(float(np.square(theirs[key].astype(float)).sum()) for key in shared)) ** 0.5


def measured(module: str, *arguments: object) -> dict[str, Any]:
    """The report of a contestant."""
    command = [sys.executable, "-m", f"benchmarks.contestants.{module}", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def speeds(name: str, step: str, repeats: int) -> dict[str, Any]:
    """Users per second of a step and of the loop, and how far apart their sums are."""
    ours = []
    loop = []
    report = {}
    for repeat in range(repeats):
        last = repeat == repeats - 1
        report = measured(
            "shipped", name, step, "auto", USERS, ROUNDS, last and step == load(name).step.name
        )
        ours += [report["users"] / seconds for seconds in report["seconds"]]
        theirs = measured("shipped_loop", name, step, LOOP_USERS, LOOP_ROUNDS)
        loop += [theirs["users"] / seconds for seconds in theirs["seconds"]]
    return {
        **_medians(ours, loop),
        **{key: report.get(key) for key in ("path", "evaluation", "peak_mib")},
        "difference": difference(name, step),
    }


def generated(name: str, step: str, repeats: int) -> dict[str, Any]:
    """The same of an experiment whose server generates the clients' parameters."""
    by_path: dict[str, list[float]] = {"reference": [], "auto": []}
    report: dict[str, Any] = {}
    for _ in range(repeats):
        for path, users_per_second in by_path.items():
            report = measured("shipped", name, "generated", path, GENERATED_ROUNDS)
            users_per_second += report["users_per_second"]
    cost = {key: report[key] for key in ("evaluation", "peak_mib")}
    node = node_of(name, "auto")
    path = str(node.path(node.step(section_of(node, step))))
    return {**_medians(by_path["auto"], by_path["reference"]), **cost, "path": path}


def _medians(ours: list[float], loop: list[float]) -> dict[str, float]:
    mine = statistics.median(ours)
    theirs = statistics.median(loop)
    return {"users_per_second": mine, "loop": theirs, "ratio": mine / theirs}


def command(name: str) -> dict[str, float]:
    """Processor seconds of an experiment's whole command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "simulations.cli", "run", name, "--quiet"]
        call += ["--engine", "serial", "--output", f"{folder}/run", "--set", "engine.threads=1"]
        environment = child_environment(OMP_NUM_THREADS="1")
        done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(call)} failed:\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime}


def lines_of(name: str, repeats: int) -> dict[str, dict[str, Callable[[], dict[str, Any]]]]:
    """The lines of an experiment, and what measures the columns of each."""
    lines: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {}
    for step, made in steps_of(name).items():
        if made.generated:
            lines[name] = {"speeds": partial(generated, name, step, repeats)}
        else:
            lines[f"{name}, {step}"] = {"speeds": partial(speeds, name, step, repeats)}
    next(iter(lines.values()))["command"] = partial(command, name)
    return lines


def table(names: Iterable[str], groups: list[str], repeats: int, file: Path | None) -> None:
    """Print a Markdown table line by line, with the measurements that a file has already."""
    rows = _measured_before(file) if file and file.exists() else {}
    titles = [title for group in groups for title, _, _ in COLUMNS[group]]
    print("|", " | ".join(["experiment, step", *titles]), "|")
    print("|" + "---|" * (len(titles) + 1))
    for name in names:
        for title, measures in lines_of(name, repeats).items():
            row = rows.setdefault(title, {})
            for group in groups:
                if group not in measures or group in row:
                    continue
                row[group] = measures[group]()
                if file:
                    write_atomically(file, json.dumps(rows, indent=2) + "\n")
            print("|", " | ".join([title, *_cells(row, groups)]), "|", flush=True)


def _measured_before(file: Path) -> dict[str, Measurements]:
    """The rows of an earlier table; ends the program if the file has none."""
    try:
        rows = read_json(file)
    except (OSError, ValueError) as error:
        rows = error
    if isinstance(rows, dict) and all(isinstance(row, dict) for row in rows.values()):
        return rows
    raise SystemExit(
        f"{file} has no measurements to continue\n"
        "  expected: a file that --json of this command wrote, or a new name\n"
        f"  got: {rows if isinstance(rows, Exception) else type(rows).__name__}\n"
        "  fix: give another name"
    )


def _cells(row: Measurements, groups: list[str]) -> list[str]:
    values = [
        (row.get(group, {}).get(key), form) for group in groups for _, key, form in COLUMNS[group]
    ]
    return ["" if value is None else format(value, form) for value, form in values]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="experiments, comma-separated; default: all")
    parser.add_argument("--without", choices=COLUMNS, help="columns that are not measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file that measurements are written to")
    given = parser.parse_args()
    federated = (name for name in sorted(shipped_experiments()) if load(name).federated)
    names = given.only.split(",") if given.only else federated
    table(names, [group for group in COLUMNS if group != given.without], given.repeats, given.json)


if __name__ == "__main__":
    main()
