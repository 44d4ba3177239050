# SPDX-License-Identifier: Apache-2.0
"""Rounds of training on a Ray cluster of three raylets, beside as many nodes on a local Ray.

    nice -n -10 python benchmarks/raylets.py [--cohort 100] [--rounds 14]

The work is that of `benchmarks.workload`. The raylets are on this machine, with a core and an
object store each, so what is compared is the way: a cluster sends parameters and replies through
object stores, a local Ray through memory that the nodes share, and its first node is in the driver.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.round_ends import RoundEnds  # noqa: E402
from benchmarks.workload import experiment  # noqa: E402
from fedrec.experiment.tables import EngineConfig  # noqa: E402
from simulations.runner import run  # noqa: E402

RAYLETS = 3
EACH: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 200 * 2**20}


def measure(label: str, cohort: int, rounds: int, **engine: object) -> None:
    """Run the work and print the time of a round, the first not counted, and of the whole run."""
    work = experiment(cohort, 3706, rounds, "ray")
    table = {**work.engine.table(), "nodes": RAYLETS, **engine}
    clock = RoundEnds()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run(
            work.model_copy(update={"engine": EngineConfig.parse(table)}),
            output=Path(folder) / "run",
            callbacks=[clock],
        )
    whole = time.perf_counter() - begun
    seconds = statistics.median(end - begin for begin, end in clock.spans())
    print(f"{label}: {1000 * seconds:.0f} ms a round, {whole:.1f} s in all", flush=True)


def main() -> None:
    """Measure a local Ray and the cluster, twice each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cohort", type=int, default=100, help="users of a round")
    parser.add_argument("--rounds", type=int, default=14, help="rounds of each run, at least 2")
    given = parser.parse_args()
    if given.cohort < 1 or given.rounds < 2:
        parser.error(
            f"expected a cohort and two rounds or more, got {given.cohort} and {given.rounds}"
        )
    for name in [name for name in os.environ if name.startswith("RAY_AUTH")]:
        del os.environ[name]  # this cluster has no token
    import ray
    from ray.cluster_utils import Cluster

    for _ in range(2):
        measure(f"local, {RAYLETS} nodes", given.cohort, given.rounds)
        cluster = Cluster(initialize_head=True, head_node_args={**EACH, "include_dashboard": False})
        for _ in range(RAYLETS - 1):
            cluster.add_node(**EACH)
        cluster.wait_for_nodes(60)
        address = {"ray-address": cluster.address}
        measure(f"{RAYLETS} raylets, a node each", given.cohort, given.rounds, **address)
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
