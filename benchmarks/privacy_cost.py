# SPDX-License-Identifier: Apache-2.0
"""What user-level differential privacy costs in time: rounds with clipping, noise and accounting
beside plain ones.

    python benchmarks/privacy_cost.py --cohort 100 --items 3706 --rounds 12 --repeats 3 [--json OUT]

The work of `benchmarks/simulation.py` on the Ray engine: every client is clipped on the whole norm
of its update, every coordinate of every parameter gets noise, and each round is charged to the
ledger on disk. Plain and private runs take turns; the figure of each is the median of all its
rounds but the first of each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.round_ends import RoundEnds  # noqa: E402
from benchmarks.workload import experiment  # noqa: E402
from fedrec.experiment.loading import load  # noqa: E402
from fedrec.experiment.schema import Experiment  # noqa: E402
from simulations.runner import run  # noqa: E402

PRIVACY = {"clip-norm": 0.5, "noise-multiplier": 1.0, "delta": 1e-5}


def rounds_of(work: Experiment) -> list[float]:
    """Seconds of each round but the first."""
    clock = RoundEnds()
    with tempfile.TemporaryDirectory() as folder:
        run(work, output=Path(folder) / "run", callbacks=[clock])
    return [end - begin for begin, end in clock.spans()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("cohort", 100), ("items", 3706), ("rounds", 12), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    plain = experiment(given.cohort, given.items, given.rounds, "ray")
    private = load({**plain.model_dump(by_alias=True, exclude_none=True), "privacy": PRIVACY})
    seconds: dict[str, list[float]] = {"plain": [], "private": []}
    for _ in range(given.repeats):
        seconds["plain"] += rounds_of(plain)
        seconds["private"] += rounds_of(private)
    found = {name: statistics.median(values) for name, values in seconds.items()}
    cost = found["private"] / found["plain"] - 1
    print(
        f"M={given.cohort}, {given.items:,} items: {found['plain']:.3f} s a plain round, "
        f"{found['private']:.3f} s a private one: {cost:+.1%}"
    )
    if given.json:
        given.json.write_text(
            json.dumps({"cohort": given.cohort, "items": given.items, **found, "cost": cost}) + "\n"
        )


if __name__ == "__main__":
    main()
