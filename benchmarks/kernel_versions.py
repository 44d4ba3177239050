# SPDX-License-Identifier: Apache-2.0
"""Processor time of a user's compiled training in (a), by several versions of the source in turns.

    python -m benchmarks.kernel_versions ../before . --repeats 20

Each version trains the users of one round of `benchmarks.workload` again and again, in a process of
its own; only compiled training is timed. In turns, what else the machine does slows all of them
down, so the ratio of two turns says more than the times: half a percent can be told apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

COHORT = 100
ITEMS = 3706


class Version:
    """A process that trains by one version.

    Args:
        checkout: its folder.
    """

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def milliseconds(self) -> float:
        """Train all users once: processor time of one.

        Raises:
            RuntimeError: the version cannot do it; its process has said why.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The version in {self.checkout} ended.")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Train all users of a round for each line of the input, and print milliseconds a user."""
    given, train = _round()
    copies = [copied(arguments) for arguments in given]  # of parameters, which are trained in place
    for _ in sys.stdin:
        begun = time.process_time()
        for arguments in copies:
            train(*arguments)
        print((time.process_time() - begun) / COHORT * 1e3, flush=True)
        copies = [copied(arguments) for arguments in given]


def _round() -> tuple[list[tuple[Any, ...]], Callable[..., None]]:
    """What compiled training is called with in the first round of (a), and the function."""
    from benchmarks.workload import experiment
    from fedrec.training import kernel
    from simulations.runner import run

    train = kernel.train_clients
    given = []

    def noted(*arguments: Any) -> None:
        given.append(copied(arguments))
        train(*arguments)

    kernel.train_clients = noted
    with tempfile.TemporaryDirectory() as folder:
        run(experiment(COHORT, ITEMS, 1, "serial"), output=Path(folder) / "run")
    kernel.train_clients = train
    return given, train


def copied(value: Any) -> Any:
    """A copy, with arrays in PyTorch's memory, which is aligned as that of training."""
    import numpy as np
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(value).clone(memory_format=torch.contiguous_format).numpy()
    if isinstance(value, tuple):
        parts = [copied(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the versions in turns, every other time in reverse order, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    for checkout in options.checkouts:
        if not (checkout / "benchmarks" / "workload.py").is_file():
            parser.error(
                f"expected checkouts of fedrec, got {checkout} without benchmarks/workload.py"
            )
    if options.repeats < 1:
        parser.error(f"expected --repeats of 1 or more, got {options.repeats}")
    with ExitStack() as stack:
        versions = [Version(checkout) for checkout in options.checkouts]
        for version in versions:
            stack.callback(version.close)
            version.milliseconds()  # its processor's caches are warm then
        times: list[list[float]] = [[] for _ in versions]
        for repeat in range(options.repeats):
            turn = list(zip(versions, times, strict=True))
            for version, own in turn if repeat % 2 == 0 else reversed(turn):
                own.append(version.milliseconds())
    print(f"{'ms a user':>30}{'least':>8}{'median':>8}{'to the first':>14}")
    for version, own in zip(versions, times, strict=True):
        ratio = statistics.median(mine / first for mine, first in zip(own, times[0], strict=True))
        print(
            f"{version.checkout!s:>30}{min(own):>8.2f}{statistics.median(own):>8.2f}{ratio:>14.3f}"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main()
