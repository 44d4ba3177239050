# SPDX-License-Identifier: Apache-2.0
"""Some rounds of a shipped experiment as a whole run on the serial engine. Arguments: experiment, path, rounds."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pandas as pd

from simulations.runner import run


def main(name: str, path: str, rounds: int) -> None:
    """Print users per second in training of each round but the first as JSON."""
    overrides = [
        *("engine.name=serial", "engine.nodes=1", "engine.threads=1", "engine.device=cpu", f"engine.path={path}"),
        *(f"rounds={rounds + 1}", "evaluation.every=0", "evaluation.final-users=1", "evaluation.baselines=[]"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = run(name, overrides, output=Path(folder) / "run")
        timings = pd.read_csv(found.folder / "timings.csv")["train"].tolist()
    cohort = found.experiment.sampler.options["cohort"]
    print(json.dumps({"users_per_second": [cohort / seconds for seconds in timings[1:]]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
