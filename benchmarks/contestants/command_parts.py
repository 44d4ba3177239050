# SPDX-License-Identifier: Apache-2.0
"""Where the processor time of a whole command goes: imports, data, baselines, training, evaluation,
writing, and all else. Argument: experiment.

It runs on the serial engine in this process, in which the functions of each part are timed; time in
a part that another one calls counts for the inner one. Checkpoints that are written beside training
count for what runs meanwhile.
"""

from __future__ import annotations

import builtins
import functools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PARTS = ("imports", "data", "baselines", "training", "evaluation", "writing", "else")


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


def parts_of(experiment: str) -> dict[str, float]:
    """Processor seconds of each part of `fedrec run EXPERIMENT`, in this process."""
    clock = Clock()
    time_imports(clock)
    with clock.part("imports"):
        from simulations.cli import main

        time_parts(clock)
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["fedrec", "run", experiment, "--engine", "serial", "--output", f"{folder}/run"]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
    clock.stop()
    return clock.seconds


if __name__ == "__main__":
    print(json.dumps(parts_of(sys.argv[1])))
