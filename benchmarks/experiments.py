# SPDX-License-Identifier: Apache-2.0
"""Every shipped experiment on one thread: users per second in training, beside a plain PyTorch
loop.

    FEDREC_DATA=DATA python benchmarks/experiments.py [--only privrec-ml1m,mf-ml1m] \\
        [--repeats 3] [--json OUT]

For each local step of each experiment in `simulations/experiments`: fedrec's path that is taken,
and the loop in `contestants/shipped_loop.py`, in turn, each in a process of its own, with the
experiment's own settings. Users per second are those of the median round over all repeats, the
first round of a process not counted. Both also do one round of one epoch, and `difference` is how
far apart their sums of updates are: the L2 norm of the difference over the norm, all parameters
together. It takes one epoch because rounding grows with the epochs, fastest where learning rates
are high.

`evaluation` is the time of the evaluation at the end of a run, all test users without and with
fine-tuning, and `MiB` the largest memory of fedrec's process, both on one thread. Steps with
parameters that a server generates (meta-MF) are timed in whole runs on the serial engine, and the
loop beside them is fedrec's own `reference` path.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
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
from benchmarks.environment import child_environment  # noqa: E402
from clients.step import Step  # noqa: E402
from fedrec.experiment.loading import load, shipped_experiments  # noqa: E402

USERS = 40
ROUNDS = 6
LOOP_USERS = 20
LOOP_ROUNDS = 2
GENERATED_ROUNDS = 6


def steps_of(name: str) -> list[str]:
    """The steps of an experiment that train several clients at once."""
    node = node_of(name, "auto")
    names = dict.fromkeys(section.name for section in node.experiment.steps())
    made = {own: node.step(section_of(node, own)) for own in names}
    return [own for own, step in made.items() if type(step).batches is not Step.batches]


def difference(name: str, step: str) -> float:
    """How far fedrec and the loop are apart after one round of one epoch, relative to how far they
    went."""
    node = node_of(name, "auto")
    (order,) = orders(node, step, LOOP_USERS, 1, epochs=1)
    _, ours = trained(node, initial(node), order)
    ((_, theirs),) = rounds_of(name, step, LOOP_USERS, 1, epochs=1)
    shared = [own for own in theirs if np.any(theirs[own])]
    apart = sum(float(np.square(ours[own].astype(float) - theirs[own]).sum()) for own in shared)
    return (apart / sum(float(np.square(theirs[own].astype(float)).sum()) for own in shared)) ** 0.5


def measured(module: str, *arguments: object) -> dict[str, Any]:
    """What a contestant printed."""
    command = [sys.executable, "-m", f"benchmarks.contestants.{module}", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(name: str, step: str, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    ours = []
    loop = []
    found = {}
    for repeat in range(repeats):
        last = repeat == repeats - 1
        found = measured(
            "shipped", name, step, "auto", USERS, ROUNDS, last and step == load(name).step.name
        )
        ours += [found["users"] / seconds for seconds in found["seconds"]]
        theirs = measured("shipped_loop", name, step, LOOP_USERS, LOOP_ROUNDS)
        loop += [theirs["users"] / seconds for seconds in theirs["seconds"]]
    return {
        **_speeds(ours, loop),
        **{key: found.get(key) for key in ("path", "evaluation", "peak_mib")},
    }


def generated(name: str, repeats: int) -> dict[str, Any]:
    """The same of an experiment whose server generates the clients' parameters."""
    speeds: dict[str, list[float]] = {"reference": [], "auto": []}
    found: dict[str, Any] = {}
    for _ in range(repeats):
        for path, own in speeds.items():
            found = measured("shipped_run", name, path, GENERATED_ROUNDS)
            own += found["users_per_second"]
    cost = {key: found[key] for key in ("evaluation", "peak_mib")}
    return {**_speeds(speeds["auto"], speeds["reference"]), **cost, "path": "blocks"}


def _speeds(ours: list[float], loop: list[float]) -> dict[str, float]:
    mine = statistics.median(ours)
    theirs = statistics.median(loop)
    return {"users_per_second": mine, "loop": theirs, "ratio": mine / theirs}


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="experiments, comma-separated; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    print(
        "| experiment, step | path | users/s | plain loop | ratio | difference | evaluation, s |"
        " MiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    federated = (name for name in sorted(shipped_experiments()) if load(name).federated)
    for name in given.only.split(",") if given.only else federated:
        if load(name).model.name == "metamf":
            rows[name] = generated(name, given.repeats)
            _print(name, rows[name])
        for step in steps_of(name):
            rows[f"{name}, {step}"] = {
                **row(name, step, given.repeats),
                "difference": difference(name, step),
            }
            _print(f"{name}, {step}", rows[f"{name}, {step}"])
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


def _print(name: str, found: dict[str, Any]) -> None:
    def cell(key: str, form: str) -> str:
        return format(found[key], form) if found.get(key) is not None else ""

    cells = [
        name,
        found["path"],
        cell("users_per_second", ".4g"),
        cell("loop", ".3g"),
        cell("ratio", ".1f"),
    ]
    print(
        "| "
        + " | ".join(
            [*cells, cell("difference", ".0e"), cell("evaluation", ".1f"), cell("peak_mib", ".0f")]
        )
        + " |"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
