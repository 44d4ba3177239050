# SPDX-License-Identifier: Apache-2.0
"""fedrec: the work as an experiment, through its strategy, grid and clients.

Arguments: work, cohort, items, engine, device, GiB for blocks.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.archive import Arrays, RoundClock
from benchmarks.workload import experiment
from fedrec.runs.folder import RunFolder
from server.callbacks.base import Callback
from simulations.runner import run


class Clock(Callback):
    """Notes when each round is over, everything that belongs to it included."""

    def __init__(self) -> None:
        self.clock = RoundClock()

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        self.clock.begin()

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        self.clock.end()
        return False


def main(path: str, cohort: int, items: int, engine: str, device: str, memory_gib: float) -> None:
    """Do the work and print when the rounds were and how far the parameters went."""
    with np.load(path) as file:
        rounds = len(file["cohorts"])
        clip = float(file["clip"])
    watch = Clock()
    table = experiment(cohort, items, rounds, engine, device, memory_gib, clip)
    with tempfile.TemporaryDirectory() as folder:
        result = run(table, output=Path(folder) / "run", callbacks=[watch])
    initial = Arrays(
        path
    ).initial()  # not before: fedrec itself begins from its own seed, and holds no second copy
    print(watch.clock.report([result.parameters[name] for name in initial], list(initial.values())))


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
        sys.argv[5],
        float(sys.argv[6]),
    )
