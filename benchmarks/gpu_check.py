# SPDX-License-Identifier: Apache-2.0
"""Everything that a GPU changes, in one command of at most six minutes: `make gpu-check`.

    python benchmarks/gpu_check.py [--minutes 6] [--output gpu-check.json]

1. `tests`: those that compare devices, and those of precision.
2. `steps`: for every step of every shipped experiment, on the path `blocks`, whose steps are
   replayed from CUDA graphs: users per second, beside one client after the other with whole tables
   (the path `reference`) on the same device; how far the sums of a round are from those of the
   processor, in float32 and, on CUDA, in bf16; and the lines that make processor and device wait
   for each other. Experiments run on synthetic data with the catalogue of MovieLens-1M, for one
   local epoch.
3. `cohorts`: PrivRec's network and matrix factorisation with 256 to 4,096 users a round: users per
   second, memory, the share of the time in which the GPU ran a kernel, and the milliseconds of the
   processor before the first step of training, for draws and layout.
4. `loop`: the same work beside a plain PyTorch loop, by `simulation.py`.

Without CUDA the same code runs on the device of `tests/second_device.py`, with few users, and the
loop on the processor. The first line says so: then the output tells that everything runs, what
differs in the sums, and what waits; of its times only the processor's for draws and layout, from
which the stand-in's are taken off, say something about a GPU. What there was no time for is listed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.contestants.ours import experiment  # noqa: E402
from benchmarks.contestants.shipped import Numbers, apart, initial, orders, trained  # noqa: E402
from benchmarks.processes import GpuWatch, finished  # noqa: E402
from clients import blocks  # noqa: E402
from clients.node import Node  # noqa: E402
from fedrec.errors import ExperimentError  # noqa: E402
from fedrec.experiment.schema import Experiment, load, shipped_experiments  # noqa: E402
from fedrec.protocol.messages import TrainOrder  # noqa: E402
from simulations.studies.declaration import shrunk  # noqa: E402
from tests.second_device import DEVICE, SecondDevice  # noqa: E402

CUDA = torch.cuda.is_available()
USERS = 256 if CUDA else 4  # a round of `steps`
ALONE = 4  # users of the path that trains one after the other
COHORTS = (256, 1024, 4096)
TRAINED = max(COHORTS) if CUDA else 16  # users of the largest round that is trained
CATALOGUE = {"users": 2000, "items": 3706, "mean-interactions": 100} if CUDA else {}
SHARES = {"tests": 0.3, "steps": 0.75, "cohorts": 0.85}
"""Share of the time after which no part of it is begun any more."""
TESTS = ("tests/clients/test_client_updates.py", "tests/fedrec/baselines/test_baselines.py")


@dataclass
class Budget:
    """The time that is left of `seconds`, and what there was no time for."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)

    def left(self, part: str = "") -> float:
        """Seconds until a part, or everything, has to end."""
        return self.begun + self.seconds * SHARES.get(part, 1.0) - time.monotonic()

    def allows(self, part: str, name: str) -> bool:
        """Whether there is time to begin with this; if not, it is noted."""
        if self.left(part) > 0:
            return True
        self.left_out.append(f"{part}: {name}")
        return False


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Lines at which processor and device wait for each other, and how often."""
    waits: Counter[str] = Counter()
    if CUDA:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.update(f"{Path(line.filename).name}:{line.lineno}" for line in seen)
    else:
        with SecondDevice() as device:
            yield waits
        waits.update(
            {line: n for (kind, line), n in device.crossings.items() if kind == "read back"}
        )


def node_on_device(plan: Experiment) -> Node:
    """The only node of an experiment, on the device."""
    node = Node(plan, 0, 1, Path(tempfile.mkdtemp()))
    if not CUDA:
        node.device = DEVICE
    return node


def planned(table: dict[str, Any], path: str, *overrides: str) -> Experiment:
    """An experiment whose clients are trained by a path, on the device."""
    device = "cuda" if CUDA else "cpu"
    return load(table, [f"engine.path={path}", f"engine.device={device}", *overrides])


def speed(node: Node, arrays: Numbers, step: str, users: int, rounds: int) -> float:
    """Users per second of the median round, the first not counted."""
    seconds = [trained(node, arrays, order)[0] for order in orders(node, step, users, rounds + 1)]
    return min(users, len(node.training)) / float(np.median(seconds[1:]))


def step_row(name: str, step: str) -> dict[str, Any]:
    """One step of a shipped experiment."""
    table = shrunk(load(name).model_dump(by_alias=True, exclude_unset=True))
    table["dataset"] |= CATALOGUE
    plain = load(table, ["engine.path=reference", "engine.device=cpu"])
    honest = Node(plain, 0, 1, Path(tempfile.mkdtemp()))
    node = node_on_device(planned(table, "blocks"))
    arrays = initial(node)
    (order,) = orders(node, step, ALONE, 1)
    wanted = trained(honest, arrays, order)[1]
    with counted() as waits:
        sums = trained(node, arrays, order)[1]
    row: dict[str, Any] = {"difference": apart(sums, wanted), "waits": dict(waits.most_common())}
    if CUDA:
        alone = node_on_device(planned(table, "reference"))
        row["users_per_second"] = speed(node, arrays, step, USERS, 3)
        row["one_by_one"] = speed(alone, arrays, step, ALONE, 1)
        half = node_on_device(planned(table, "blocks", "engine.precision=bf16"))
        with suppress(ExperimentError):  # it adds its own noise, which rounding would spoil
            row["difference_bf16"] = apart(trained(half, arrays, order)[1], wanted)
    return row


def steps(budget: Budget) -> dict[str, Any]:
    """Every step of every shipped experiment; those whose server generates the clients' parameters
    are covered by the tests."""
    rows: dict[str, Any] = {}
    for name in sorted(shipped_experiments()):
        plan = load(name)
        if not plan.federated or plan.model.name in ("metamf", "gpfedrec", "fedgnn"):
            continue
        for step in dict.fromkeys(section.name for section in plan.steps().values()):
            label = f"{name}, {step}"
            if budget.allows("steps", label):
                try:
                    rows[label] = step_row(name, step)
                except Exception as error:  # the others are still of interest
                    rows[label] = {"failed": f"{type(error).__name__}: {error}"}
                print(f"  {label}: {rows[label]}", flush=True)
    return rows


def systems(users: int) -> dict[str, Experiment]:
    """What is trained by so many users in a round."""
    device = "cuda" if CUDA else "cpu"
    table = shrunk(load("mf-ml1m").model_dump(by_alias=True, exclude_unset=True))
    table["dataset"] |= {"users": 6000, "items": 3706, "mean-interactions": 165}
    network = experiment(users, 3706, 1, "serial", device, 16.0).model_dump(by_alias=True)
    memory = "engine.memory-gib=16"
    return {"privrec": planned(network, "blocks"), "mf": planned(table, "blocks", memory)}


def cohorts(budget: Budget) -> dict[str, Any]:
    """Two systems over the size of the cohort."""
    rows: dict[str, Any] = {}
    for users in COHORTS:
        for name, plan in systems(users).items():
            label = f"{name}, {users} users"
            if not budget.allows("cohorts", label):
                continue
            node = node_on_device(plan)
            arrays = initial(node)
            rows[label] = {"processor_ms": before_training(node, arrays, users)}
            if users <= TRAINED:
                rows[label] |= cohort_row(node, arrays, users)
            print(f"  {label}: {rows[label]}", flush=True)
    return rows


class _Begins(Exception):
    """Training would begin."""


def before_training(node: Node, arrays: Numbers, users: int) -> float:
    """Milliseconds of the processor until the first step of a round, after one that compiles what
    it calls; without those of the stand-in."""
    spent = 0.0
    for order in orders(node, node.experiment.step.name, users, 2):
        begun = time.process_time()
        device = SecondDevice() if not CUDA else None
        with (
            device or nullcontext(),
            mock.patch.object(blocks._Training, "_trained", side_effect=_Begins),
            suppress(_Begins),
        ):
            trained(node, arrays, order)
        spent = time.process_time() - begun - (device.seconds if device else 0.0)
    return round(1000 * spent, 1)


def cohort_row(node: Node, arrays: Numbers, users: int) -> dict[str, float]:
    """Rounds of so many users."""
    chosen = np.random.default_rng(0).permutation(node.training)[:users]
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        trained(node, arrays, TrainOrder(1, np.sort(chosen)))
    busy = GpuWatch("cuda" if CUDA else "cpu")
    begun = time.monotonic()
    rounds = 0
    while rounds == 0 or (CUDA and time.monotonic() - begun < 5):
        rounds += 1
        with SecondDevice() if not CUDA else warnings.catch_warnings():
            trained(node, arrays, TrainOrder(rounds + 1, np.sort(chosen)))
    ended = time.monotonic()
    busy.stop()
    memory = {"peak_mib": torch.cuda.max_memory_allocated() / 2**20} if CUDA else {}
    speeds = {"users_per_second": len(chosen) * rounds / (ended - begun)}
    return {**speeds, **memory, **busy.figures(begun, ended)}


def tests(budget: Budget) -> dict[str, Any]:
    """Pytest's last line."""
    files = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
    marks = ["-m", "slow or not slow"] if CUDA else []
    passed, summary = _run([*files, *marks], budget, "tests")
    return {"passed": passed, "summary": summary}


def loop(budget: Budget) -> dict[str, Any]:
    """fedrec beside a plain loop."""
    if not budget.allows("loop", "a plain loop"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "benchmarks/simulation.py", "--no-memory", "--repeats", "1"]
        where = ["--device", "cuda" if CUDA else "cpu", "--memory-gib", "16" if CUDA else "1"]
        size = ["--cohort", "400" if CUDA else "10", "--rounds", "3", "--json", str(figures)]
        systems = ["--contestants", "fedrec-serial,loop"]
        passed, last = _run([*command, *where, *size, *systems], budget, "loop")
        if not passed:
            return {"failed": last}
        report = json.loads(figures.read_text())
    keys = ("users_per_second", "gpu_busy", "equal_results", "cohort", "device")
    return {key: report[key] for key in keys if key in report}


def _run(command: list[str], budget: Budget, part: str) -> tuple[bool, str]:
    """Whether a command succeeded before its part of the time was over, and its last line."""
    try:
        done = finished(command, timeout=max(1.0, budget.left(part)))
    except subprocess.TimeoutExpired:
        budget.left_out.append(f"{part}: stopped")
        return False, "stopped: no time left"
    lines = [*done.stderr.strip().splitlines(), *done.stdout.strip().splitlines()]
    return not done.returncode, (lines or [""])[-1]


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    versions = {"torch": torch.__version__, "python": platform.python_version(), "cuda": CUDA}
    if not CUDA:
        return {**versions, "device": "tests/second_device.py, without hardware"}
    about = torch.cuda.get_device_properties(0)
    return {**versions, "device": about.name, "memory_gib": round(about.total_memory / 2**30)}


def main() -> None:
    """Check, print and write one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="the longest that it may take")
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"))
    given = parser.parse_args()
    if given.minutes <= 0:
        parser.error(f"--minutes: expected more than 0, got {given.minutes}")
    torch.set_num_threads(1)
    budget = Budget(60 * given.minutes)
    report: dict[str, Any] = {"machine": machine()}
    print(f"{'Runs' if CUDA else 'Does not run'} on a GPU: {machine()['device']}", flush=True)
    for part in (tests, steps, cohorts, loop):
        print(f"{part.__name__}:", flush=True)
        report[part.__name__] = part(budget)
        if part in (tests, loop):
            print(f"  {report[part.__name__]}", flush=True)
    report |= {"left_out": budget.left_out, "seconds": round(budget.seconds - budget.left())}
    given.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"left out: {', '.join(budget.left_out) or 'nothing'}\n{given.output}")
    failed = [name for name, row in report["steps"].items() if "failed" in row]
    if failed or not report["tests"]["passed"]:
        raise SystemExit(f"failed: {', '.join(failed) or report['tests']['summary']}")


if __name__ == "__main__":
    main()
