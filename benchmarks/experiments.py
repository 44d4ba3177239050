# SPDX-License-Identifier: Apache-2.0
"""Every shipped federated experiment: users per second in training on one thread, beside one client
after the other in PyTorch, and the processor time of its whole command.

    FEDREC_DATA=DATA python benchmarks/experiments.py [--only privrec-ml1m,mf-ml1m] \\
        [--without speeds | --without command] [--repeats 3] [--json OUT]

Speeds, a line for each local step of each experiment in `simulations/experiments`: the path that is
taken, and the path `reference` (the loop), in turn, each in a process of its own, with the
experiment's own settings. Users per second are those of the median round over all repeats,
the first round of a process not counted. Both also do one round of one epoch, and `difference` is
how far apart their sums of updates are: the L2 norm of the difference over the norm, all parameters
together. It takes one epoch because rounding grows with the epochs, fastest where learning rates
are high. Steps with parameters that a server generates (meta-MF, GPFedRec, FedGNN) have no speed
without a server; only their command is timed.

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
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.contestants.shipped import apart, initial, node_of, orders, section_of, trained  # noqa: E402
from benchmarks.processes import finished  # noqa: E402
from clients.step import Step  # noqa: E402
from fedrec.experiment.schema import load, shipped_experiments  # noqa: E402
from fedrec.runtime.files import read_json, write_atomically  # noqa: E402

USERS = 40
ROUNDS = 6
LOOP_USERS = 20
LOOP_ROUNDS = 2
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
    """The steps of an experiment that train several clients at once."""
    node = node_of(name, "auto")
    names = dict.fromkeys(section.name for section in node.experiment.steps().values())
    steps = {step: node.step(section_of(node, step)) for step in names}
    return {
        name: step
        for name, step in steps.items()
        if not step.generated and (step.draw() or type(step).batches is not Step.batches)
    }


def difference(name: str, step: str) -> float:
    """How far two paths are apart after one round of one epoch, see `apart`."""
    sums = []
    for path in ("auto", "reference"):
        node = node_of(name, path)
        (order,) = orders(node, step, LOOP_USERS, 1, epochs=1)
        sums.append(trained(node, initial(node), order)[1])
    return apart(*sums)


def measured(*arguments: object) -> dict[str, Any]:
    """The report of `contestants/shipped.py`."""
    output = _printed("-m", "benchmarks.contestants.shipped", *arguments)
    return json.loads(output.strip().splitlines()[-1])


def _printed(*arguments: object, **environment: str) -> str:
    """Output of Python with some arguments; a failure ends the program."""
    done = finished([sys.executable, *arguments], values=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def speeds(name: str, step: str, repeats: int) -> dict[str, Any]:
    """Users per second of a step and of the loop, and how far apart their sums are."""
    ours = []
    loop = []
    report = {}
    for repeat in range(repeats):
        evaluates = repeat == repeats - 1 and step == load(name).step.name
        report = measured(name, step, "auto", USERS, ROUNDS, evaluates)
        ours += [report["users"] / seconds for seconds in report["seconds"]]
        other = measured(name, step, "reference", LOOP_USERS, LOOP_ROUNDS, False)
        loop += [other["users"] / seconds for seconds in other["seconds"]]
    mine = statistics.median(ours)
    theirs = statistics.median(loop)
    return {
        "users_per_second": mine,
        "loop": theirs,
        "ratio": mine / theirs,
        **{key: report.get(key) for key in ("path", "evaluation", "peak_mib")},
        "difference": difference(name, step),
    }


def command(name: str) -> dict[str, float]:
    """Processor seconds of an experiment's whole command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--engine", "serial", "--output", f"{folder}/run", "--set", "engine.threads=1"]
        call = ("-m", "simulations.cli", "run", name, "--quiet", *options)
        _printed(*call, OMP_NUM_THREADS="1")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime}


def lines_of(name: str, repeats: int) -> dict[str, dict[str, Callable[[], dict[str, Any]]]]:
    """The lines of an experiment, and what measures the columns of each."""
    lines: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
        f"{name}, {step}": {"speeds": partial(speeds, name, step, repeats)}
        for step in steps_of(name)
    }
    first = next(iter(lines), name)
    lines.setdefault(first, {})["command"] = partial(command, name)
    return lines


def table(names: Iterable[str], groups: list[str], repeats: int, file: Path | None) -> None:
    """Print a Markdown table line by line, with the measurements that a file has already."""
    rows: dict[str, Measurements] = read_json(file) if file and file.exists() else {}
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
