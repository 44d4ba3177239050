# SPDX-License-Identifier: Apache-2.0
"""fedrec: the work as an experiment, through its strategy, grid and clients. Arguments: work, cohort, items, engine."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import experiment, squared_sum
from fedrec.runs import RunFolder
from server.callbacks.base import Callback
from simulations.runner import run


class Clock(Callback):
    """Notes when each round is over, everything that belongs to it included."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        self.times.append(time.perf_counter())

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        self.times.append(time.perf_counter())
        return False


def main(path: str, cohort: int, items: int, engine: str) -> None:
    """Do the work and print seconds per round and the sum of squared parameters."""
    with np.load(path) as file:
        rounds = len(file["cohorts"])
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        result = run(experiment(cohort, items, rounds, engine), output=Path(folder) / "run", callbacks=[clock])
    seconds = [end - start for start, end in itertools.pairwise(clock.times)]
    print(json.dumps({"seconds": seconds, "squared_sum": squared_sum(result.parameters)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
