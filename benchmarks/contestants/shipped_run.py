# SPDX-License-Identifier: Apache-2.0
"""Some rounds of a shipped experiment as a whole run on the serial engine. Arguments: experiment,
path, rounds."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pandas as pd

from benchmarks.contestants.shipped import peak_mib
from simulations.runner import run


def main(name: str, path: str, rounds: int) -> None:
    """Print as JSON users per second in training of each round but the first, seconds of the
    evaluation, and memory."""
    overrides = [
        *(
            "engine.name=serial",
            "engine.nodes=1",
            "engine.threads=1",
            "engine.device=cpu",
            f"engine.path={path}",
        ),
        *(f"rounds={rounds + 1}", "evaluation.every=0", "evaluation.baselines=[]"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = run(name, overrides, output=Path(folder) / "run")
        timings = pd.read_csv(found.folder / "timings.csv")["train"].tolist()
        evaluation = json.loads((found.folder / "result.json").read_text())["seconds"]["evaluation"]
    cohort = found.experiment.sampler.options["cohort"]
    speeds = [cohort / seconds for seconds in timings[1:]]
    print(
        json.dumps({"users_per_second": speeds, "evaluation": evaluation, "peak_mib": peak_mib()})
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
