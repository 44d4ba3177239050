# SPDX-License-Identifier: Apache-2.0
"""Transitions between the items of very many users: time and memory of the baseline `transitions`,
whose sums are sparse.

    python benchmarks/transitions.py [--users 1000000] [--items 100000] [--each 20] [--window 10]

Users have `each` items in a random order, item i with probability proportional to 1 / (i + 100).
Prints the seconds of the fit and of scoring 256 users, the number of pairs of items that have a
weight, and the largest memory of the process.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.contestants.shipped import peak_mib
from fedrec.baselines.base import Histories
from fedrec.baselines.simple import TransitionsBaseline


def histories(users: int, items: int, each: int) -> Histories:
    """Users' items, drawn anew for every place."""
    shares = np.cumsum(1 / (np.arange(items) + 100))
    drawn = np.random.default_rng(0).random(users * each) * shares[-1]
    return Histories(items, np.arange(users + 1) * each, np.searchsorted(shares, drawn))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--window", type=int, default=10)
    given = parser.parse_args()
    all_users = histories(given.users, given.items, given.each)
    baseline = TransitionsBaseline(TransitionsBaseline.Config(window=given.window))
    before = peak_mib()
    begun = time.perf_counter()
    baseline.fit(all_users)
    fitted = time.perf_counter()
    baseline.scores(all_users.block(0, 256))
    scored = time.perf_counter()
    pairs = baseline._weights.nnz
    print(f"fit {fitted - begun:.0f} s, 256 users scored in {scored - fitted:.1f} s")
    print(f"{pairs:,} pairs; {before:.0f} MiB before the fit, {peak_mib():.0f} MiB at most")


if __name__ == "__main__":
    main()
