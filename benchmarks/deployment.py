# SPDX-License-Identifier: Apache-2.0
"""What a deployment costs on this machine: start, rounds against the Ray engine, memory per node,
many nodes.

    python -m benchmarks.deployment start --nodes 8
    python -m benchmarks.deployment rounds --nodes 2 --rounds 20
    python -m benchmarks.deployment load --nodes 200
    python -m benchmarks.deployment idle --nodes 8

All processes share the machine, so that times with many nodes are those of one machine doing
everybody's work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from fedrec.experiment.loading import load as load_experiment
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from simulations import runner
from simulations.deployment import launch, operator
from simulations.deployment.initialise import initialise
from simulations.deployment.layout import Deployment, DeploymentConfig
from simulations.deployment.shards import cut_for


def main() -> None:
    """Run the measurement that the command line names, and print it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["start", "rounds", "load", "idle"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--port", type=int, default=28443)
    given = parser.parse_args()
    measure = {"start": start, "rounds": rounds, "load": load, "idle": idle}[given.what]
    print(json.dumps(measure(given.nodes, given.rounds, given.port), indent=2))


def start(nodes: int, _rounds: int, port: int) -> dict[str, float]:
    """Seconds until all nodes are online, the first time and again, and until all has stopped."""
    with deployed(experiment(nodes, 1), nodes, port) as (deployment, first):
        again = time.perf_counter()
        operator.down(deployment)
        stopped = time.perf_counter()
        operator.up(deployment)
        return {
            "nodes": nodes,
            "up": first,
            "down": stopped - again,
            "up again": time.perf_counter() - stopped,
            **load_of(),
        }


def rounds(nodes: int, count: int, port: int) -> dict[str, float]:
    """Seconds per round, deployed and on the Ray engine, on the same work."""
    table = experiment(nodes, count)
    with deployed(table, nodes, port) as (deployment, _):
        cpu = cpu_seconds(deployment)
        seconds = deployed_rounds(deployment, table)
        spent = (cpu_seconds(deployment) - cpu) / count
    with tempfile.TemporaryDirectory() as folder:
        table["engine"] |= {"name": "ray", "nodes": nodes}
        runner.run({**table}, output=Path(folder) / "run")
        simulated = pd.read_csv(Path(folder) / "run" / "timings.csv")["seconds"].tolist()
    middle = statistics.median(seconds[1:])
    ray = statistics.median(simulated[1:])
    found = {
        "nodes": nodes,
        "rounds": count,
        "deployed": middle,
        "ray": ray,
        "overhead": middle - ray,
    }
    return {**found, "cpu seconds per round of superlink, gateway and nodes": spent, **load_of()}


def load(nodes: int, count: int, port: int) -> dict[str, float]:
    """One user per node: start, memory, rounds in which all take part."""
    table = experiment(nodes, min(count, 5), users=nodes, everybody=True)
    with deployed(table, nodes, port, wait=1500) as (deployment, first):
        idle = memory(deployment)
        before = cpu_by_process(deployment)
        seconds = deployed_rounds(deployment, table)
        after = cpu_by_process(deployment)
        busy = memory(deployment)
        clients = pd.read_csv(deployment.path / "runs" / "measured" / "rounds.csv")[
            "num-clients"
        ].tolist()
        return {
            "nodes": nodes,
            "up": first,
            "median round": statistics.median(seconds),
            "clients per round": min(clients),
            **{
                f"{name} cpu seconds per round": (after[name] - before[name]) / len(seconds)
                for name in after
            },
            **{f"{name} MiB": value for name, value in idle.items()},
            **{f"{name} MiB after rounds": value for name, value in busy.items()},
            **load_of(),
        }


def idle(nodes: int, _rounds: int, port: int) -> dict[str, float]:
    """Processor time while nothing is done, from half a minute after the start."""
    with deployed(experiment(nodes, 1), nodes, port) as (deployment, _):
        time.sleep(30)
        before = cpu_by_process(deployment)
        started = time.perf_counter()
        time.sleep(90)
        seconds = time.perf_counter() - started
        after = cpu_by_process(deployment)
    spent = {name: 1000 * (after[name] - before[name]) / seconds for name in after}
    return {
        "nodes": nodes,
        "ms of processor time a second, per node": spent["nodes"] / nodes,
        "ms of processor time a second, SuperLink": spent["superlink"],
        **load_of(),
    }


def experiment(nodes: int, count: int, users: int = 600, everybody: bool = False) -> dict:
    """A small PrivRec; each round a cohort of 40, or everybody."""
    return {
        "name": "measured",
        "rounds": count,
        "positive-above": 3.0,
        "dataset": {"name": "synthetic", "users": users, "items": 400, "min-interactions": 8},
        "split": {"name": "leave-one-out"},
        "step": {"name": "sgd", "epochs": 2},
        "sampler": {"name": "fixed-size", "cohort": users if everybody else min(40, users)},
        "evaluation": {"every": 0, "final-users": 8, "baselines": []},
        "engine": {"threads": 1, "device": "cpu", "timeout": 900.0, "nodes": nodes},
    }


@contextmanager
def deployed(
    table: dict,
    nodes: int,
    port: int,
    wait: float = 300,
    prepare: Callable[[Deployment], None] = lambda deployment: None,
) -> Iterator[tuple[Deployment, float]]:
    """A running deployment with shards of an experiment's dataset, and the seconds that its start
    took; `prepare` may change the folders of its nodes before."""
    with tempfile.TemporaryDirectory(prefix="fedrec-measured-") as folder:
        settings = {"nodes": nodes, "port": port, "superlink-port": port + 1, "node-port": port + 2}
        deployment = initialise(Path(folder) / "d", DeploymentConfig.parse(settings))
        deployment = cut_for(deployment, load_experiment(table))
        prepare(deployment)
        started = time.perf_counter()
        try:
            operator.up(deployment, wait=wait)
            yield deployment, time.perf_counter() - started
        finally:
            operator.down(deployment, wait=180)


def deployed_rounds(deployment: Deployment, table: dict) -> list[float]:
    """Seconds of each round of a run."""
    return pd.read_csv(deployed_run(deployment, table).folder / "timings.csv")["seconds"].tolist()


def deployed_run(deployment: Deployment, table: dict) -> Result:
    """A run to its end; its folder is `runs/measured` of the deployment."""
    folder = RunFolder.create(launch.settled(table), deployment.path / "runs" / "measured")
    return launch.wait(deployment, folder, launch.start(deployment, folder))


def tree(pid: int) -> list[int]:
    """A process and all that it started."""
    parents: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(file.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(file.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def memory(deployment: Deployment) -> dict[str, float]:
    """Proportional memory in MiB of the SuperLink, the gateway, and a node on average (shared pages
    in equal parts)."""
    pids = {state.name: state.pid for state in operator.states(deployment) if state.pid}
    families = {
        name: tree(pids[name]) if name in pids else [] for name in ("superlink", "gateway", "nodes")
    }
    parts = {name: sum(_proportional(pid) for pid in family) for name, family in families.items()}
    return {**parts, "per node": parts["nodes"] / deployment.settings.nodes}


def cpu_by_process(deployment: Deployment) -> dict[str, float]:
    """Processor seconds that each of the server's processes and all nodes together have used."""
    running = [state for state in operator.states(deployment) if state.pid]
    return {state.name: _cpu_of(tree(state.pid)) for state in running if state.pid}


def cpu_seconds(deployment: Deployment) -> float:
    """Processor seconds that the SuperLink, the gateway and the nodes have used, their ended
    children included."""
    found = cpu_by_process(deployment)
    return sum(seconds for name, seconds in found.items() if name != "serverapp")


def _cpu_of(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += sum(int(fields[place]) for place in (11, 12, 13, 14))
    return ticks / os.sysconf("SC_CLK_TCK")


def load_of() -> dict[str, float]:
    """How busy the machine was, as a warning."""
    return {"load of the machine": os.getloadavg()[0], "cores": os.cpu_count() or 0}


def _proportional(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
