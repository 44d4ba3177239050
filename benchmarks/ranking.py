# SPDX-License-Identifier: Apache-2.0
"""Processor time of ranking a long catalogue for users whom nobody fine-tunes, on one thread.

    python benchmarks/ranking.py [--items 1000000] [--users 1000]

Two systems with the parameters that training starts from: `mf`, private factors of users and shared
ones of items (64), and `linear`, item-to-item weights of 4,000 items, so that all others are tied.
All ranking metrics of a finished run are computed, whole lists and single positives, and those of
items without training rows, as most are here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.contestants.shipped import initial, peak_mib  # noqa: E402
from clients.evaluation import evaluate_clients  # noqa: E402
from clients.node import Node  # noqa: E402
from fedrec.experiment.loading import load  # noqa: E402
from fedrec.protocol.orders import EvaluateOrder  # noqa: E402

FACTORS = {
    "split": {"name": "ratio"},
    "model": {"name": "mf", "factors": 64},
    "step": {"name": "sgd", "private-parameters": ["user.*"]},
    "strategy": {"name": "fedavg"},
    "sampler": {"name": "fixed-size", "cohort": 10},
    "rounds": 1,
}
LINEAR = {
    "split": {"name": "user-holdout"},
    "model": {"name": "item-weights", "items": 4000},
    "step": {"name": "gram"},
    "strategy": {"name": "popularity-start", "main": {"name": "gram"}},
    "sampler": {"name": "full"},
    "rounds": 2,
}
SYSTEMS: dict[str, dict[str, Any]] = {"mf": FACTORS, "linear": LINEAR}


def measured(system: str, items: int, users: int) -> tuple[int, float]:
    """How many users were evaluated, and seconds of processor time."""
    data = {"name": "synthetic", "users": 6 * users, "items": items, "mean-interactions": 50}
    plan = load(
        {
            **SYSTEMS[system],
            "name": "ranking",
            "dataset": data,
            "evaluation": {"baselines": [], "fine-tune": {"epochs": 0}},
            "engine": {"name": "serial", "threads": 1, "device": "cpu"},
        }
    )
    node = Node(plan, 0, 1, Path(tempfile.mkdtemp()))
    arrays = initial(node)
    step = {"name": plan.step.name, **plan.step.options, "epochs": 0}
    chosen = node.evaluated[:users]
    begun = time.process_time()
    evaluate_clients(node, arrays, EvaluateOrder(1, chosen, step=step, sums=True))
    return len(chosen), time.process_time() - begun


def main() -> None:
    """Measure and print a line for each system."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=1_000_000, help="size of the catalogue")
    parser.add_argument("--users", type=int, default=1000, help="users whose lists are ranked")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for system in SYSTEMS:
        users, seconds = measured(system, given.items, given.users)
        print(
            f"{system}: {users} users, {given.items:,} items: {seconds:.1f} s of processor time,"
            f" {1000 * seconds / users:.1f} ms a user; peak {peak_mib():.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
