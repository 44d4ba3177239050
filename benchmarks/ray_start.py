# SPDX-License-Identifier: Apache-2.0
"""What Ray's token costs at the start of a local Ray: starts with and without it, in turn.

    python -m benchmarks.ray_start --pairs 10

Each start is a fresh process; seconds are those of `ray.init`, a first task, and `ray.shutdown`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

_START = """
import time, json, sys
from contextlib import nullcontext
from simulations.engines.ray import alone
with alone() if sys.argv[1] == "token" else nullcontext():
    import ray
    began = time.perf_counter()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
             logging_level="ERROR", object_store_memory=100 * 2**20)
    started = time.perf_counter()
    assert ray.get(ray.remote(lambda: 5).remote()) == 5
    worked = time.perf_counter()
    ray.shutdown()
    ended = time.perf_counter()
print(json.dumps([started - began, worked - started, ended - worked]))
"""
_PARTS = ("init", "first task", "shutdown")


def main() -> None:
    """Measure, and print medians and the median difference of a pair as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    pairs = parser.parse_args().pairs
    found: dict[str, list[list[float]]] = {"token": [], "none": []}
    for number in range(pairs):
        for kind in ("token", "none") if number % 2 else ("none", "token"):
            found[kind].append(_start(kind))
    table = {}
    for place, part in enumerate(_PARTS):
        token, none = ([times[place] for times in found[kind]] for kind in ("token", "none"))
        table[part] = {
            "with token": statistics.median(token),
            "without": statistics.median(none),
            "median difference": statistics.median(
                one - other for one, other in zip(token, none, strict=True)
            ),
        }
    print(json.dumps({"pairs": pairs, "load": os.getloadavg()[0], **table}, indent=2))


def _start(kind: str) -> list[float]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    command = [sys.executable, "-c", _START, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
