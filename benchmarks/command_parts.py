# SPDX-License-Identifier: Apache-2.0
"""Where the processor time of a whole command goes: imports, data, baselines, training, evaluation,
writing, and all else.

    FEDREC_DATA=DATA python benchmarks/command_parts.py [EXPERIMENT ...] [--json OUT]

Each experiment runs on the serial engine in a process of its own, in which the functions of each
part are timed; time in a part that another one calls counts for the inner one. Baselines are fitted
(nothing kept is read). Checkpoints that are written beside training count for what runs meanwhile.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PARTS = ("imports", "data", "baselines", "training", "evaluation", "writing", "else")
EXPERIMENTS = ("privrec-synthetic", "privrec-ml1m", "mf-ml1m", "fed-fold-in-ml1m")


class Clock:
    """Processor seconds of each part of this process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {part: 0.0 for part in PARTS}
        self._parts = ["else"]
        self._since = 0.0  # the process began before this file was read

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens in it counts for the part, in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.stop()
        self._parts.append(name)
        try:
            yield
        finally:
            self.stop()
            self._parts.pop()

    def stop(self) -> None:
        """Count what has passed for the innermost part."""
        now = time.process_time()
        self.seconds[self._parts[-1]] += now - self._since
        self._since = now

    def timed(self, owner: Any, name: str, part: str) -> None:
        """Let a function or method of a module or class count for a part."""
        whole = owner.__dict__[name]
        function: Callable[..., Any] = getattr(whole, "__func__", whole)

        @functools.wraps(function)
        def counted(*given: Any, **named: Any) -> Any:
            with self.part(part):
                return function(*given, **named)

        setattr(owner, name, type(whole)(counted) if whole is not function else counted)


def time_imports(clock: Clock) -> None:
    """Count every import of a module that is not loaded yet."""
    load = builtins.__import__

    def counted(name: str, *given: Any, **named: Any) -> Any:
        if name in sys.modules:
            return load(name, *given, **named)
        with clock.part("imports"):
            return load(name, *given, **named)

    builtins.__import__ = counted


def time_parts(clock: Clock) -> None:
    """Count the functions of each part."""
    from fedrec.data.population import Population
    from fedrec.runs.folder import RunFolder
    from server import run
    from server.checkpoint import Checkpoints
    from server.evaluation import Evaluator
    from server.loop import Loop

    clock.timed(Population, "of", "data")
    clock.timed(run, "run_baselines", "baselines")
    clock.timed(Loop, "_train", "training")
    clock.timed(Evaluator, "evaluate", "evaluation")
    for name in ("save", "begin", "finish"):
        clock.timed(Checkpoints, name, "writing")
    for name in [name for name in vars(RunFolder) if name.startswith("write_")]:
        clock.timed(RunFolder, name, "writing")


def measured(experiment: str) -> dict[str, float]:
    """Processor seconds of each part of `fedrec run EXPERIMENT`, in this process."""
    clock = Clock()
    time_imports(clock)
    with clock.part("imports"):
        from simulations.cli import main

        time_parts(clock)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        sys.argv = ["fedrec", "run", experiment, "--engine", "serial", "--output", f"{folder}/run"]
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            try:
                main()
            except SystemExit as end:
                if end.code:
                    raise
    clock.stop()
    return clock.seconds


def main() -> None:
    """Measure each experiment in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiments", nargs="*", default=EXPERIMENTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measured(given.experiments[0])))
        return
    found = {}
    print("| experiment | processor s |", " | ".join(PARTS), "|")
    print("|---|" + "---|" * (len(PARTS) + 1))
    environment = {**os.environ, "FEDREC_CACHE_BASELINES": "no", "OMP_NUM_THREADS": "1"}
    for name in given.experiments:
        command = (sys.executable, __file__, name, "--here")
        done = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        found[name] = json.loads(done.stdout.splitlines()[-1])
        parts = " | ".join(f"{found[name][part]:.1f}" for part in PARTS)
        print(f"| {name} | {sum(found[name].values()):.1f} | {parts} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
