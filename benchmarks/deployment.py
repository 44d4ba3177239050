# SPDX-License-Identifier: Apache-2.0
"""Real nodes on this machine, one user each: seconds until all are online, seconds of a round in
which all take part, processor time and memory.

    python -m benchmarks.deployment --nodes 200 --rounds 2

All processes share the machine, so times with many nodes are those of one machine doing everybody's
work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.processes import processes, pss_mib
from fedrec.experiment.schema import load as load_experiment
from fedrec.runs.folder import RunFolder
from simulations.deployment import launch, operator
from simulations.deployment.layout import Deployment, DeploymentConfig, initialise
from simulations.deployment.shards import cut_for


def experiment(users: int, rounds: int) -> dict[str, Any]:
    """A small PrivRec in which everybody trains in each round."""
    return {
        "name": "measured",
        "rounds": rounds,
        "positive-above": 3.0,
        "dataset": {"name": "synthetic", "users": users, "items": 400, "min-interactions": 8},
        "split": {"name": "leave-one-out"},
        "step": {"name": "sgd", "epochs": 2},
        "sampler": {"name": "fixed-size", "cohort": users},
        "evaluation": {"every": 0, "final-users": 8, "baselines": []},
        "engine": {"threads": 1, "device": "cpu", "timeout": 900.0, "nodes": users},
    }


def measured(nodes: int, rounds: int, port: int) -> dict[str, float]:
    """Start a deployment, run an experiment on it, and stop it."""
    table = experiment(nodes, rounds)
    with tempfile.TemporaryDirectory(prefix="fedrec-measured-") as folder:
        settings = {"nodes": nodes, "port": port, "superlink-port": port + 1, "node-port": port + 2}
        deployment = initialise(Path(folder) / "d", DeploymentConfig.parse(settings))
        deployment = cut_for(deployment, load_experiment(table))
        started = time.perf_counter()
        try:
            operator.up(deployment, wait=1500)
            online = time.perf_counter() - started
            before = usage(deployment)
            run = RunFolder.create(launch.settled(table), deployment.path / "runs" / "measured")
            launch.wait(deployment, run, launch.start(deployment, run))
            after = usage(deployment)
        finally:
            operator.down(deployment, wait=180)
        seconds = pd.read_csv(run.path / "timings.csv")["seconds"].tolist()
        clients = pd.read_csv(run.path / "rounds.csv")["num-clients"].tolist()
    figures = {
        "nodes": nodes,
        "seconds until all are online": online,
        "median seconds of a round": statistics.median(seconds),
        "least clients of a round": min(clients),
        "load of the machine": os.getloadavg()[0],
    }
    for name, (cpu, mib) in after.items():
        figures[f"{name}: processor seconds a round"] = (cpu - before[name][0]) / len(seconds)
        figures[f"{name}: MiB"] = mib
    return figures


def usage(deployment: Deployment) -> dict[str, tuple[float, float]]:
    """Processor seconds and proportional memory in MiB of each of the server's processes and of all
    nodes together, ended children included in the seconds."""
    table = processes()
    figures = {}
    for state in operator.states(deployment):
        if not state.pid:
            continue
        family = [state.pid]
        for member in family:
            family += [number for number, (parent, _, _) in table.items() if parent == member]
        ticks = sum(table[number][2] for number in family if number in table)
        figures[state.name] = (
            ticks / os.sysconf("SC_CLK_TCK"),
            sum(pss_mib(number) for number in family),
        )
    return figures


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=28443)
    given = parser.parse_args()
    print(json.dumps(measured(given.nodes, given.rounds, given.port), indent=2))


if __name__ == "__main__":
    main()
