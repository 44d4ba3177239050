# SPDX-License-Identifier: Apache-2.0
"""fedrec: the work as an experiment, through its strategy, grid and clients. Arguments: work, cohort, items, engine."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pandas as pd

from benchmarks.workload import experiment, squared_sum
from simulations.runner import run


def main(path: str, cohort: int, items: int, engine: str) -> None:
    """Do the work and print seconds per round and the sum of squared parameters."""
    import numpy as np

    with np.load(path) as file:
        rounds = len(file["cohorts"])
    with tempfile.TemporaryDirectory() as folder:
        result = run(experiment(cohort, items, rounds, engine), output=Path(folder) / "run")
        seconds = pd.read_csv(Path(folder) / "run" / "timings.csv")["seconds"].tolist()
    print(json.dumps({"seconds": seconds, "squared_sum": squared_sum(result.parameters)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
