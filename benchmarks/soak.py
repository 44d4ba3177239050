# SPDX-License-Identifier: Apache-2.0
"""A long run on a deployment whose processes are killed at random, compared with undisturbed runs.

    python -m benchmarks.soak --rounds 500 --nodes 8 --seconds 5

Every few seconds one of SuperNodes, executors, the gateway or the SuperLink gets SIGKILL, or
(seldom) the ServerApp, whose run is then resumed. Memory, open files and sizes on disk of the
long-lived processes are printed as JSON lines while it runs, and at the end rounds, kills, and the
final metrics, of the users whose nodes are connected and of all, together with those of undisturbed
runs with several seeds. The latter are simulations, which give the same numbers as a deployment (a
test compares them) in minutes instead of hours.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.deployment import deployed, experiment, load_of, memory, tree
from fedrec.errors import EngineError
from fedrec.experiment.loading import load
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from server.checkpoint import Checkpoints
from simulations import runner
from simulations.deployment import launch, operator
from simulations.deployment.layout import Deployment

KILLED = {"supernode": 8.0, "executor": 8.0, "superlink": 0.25, "gateway": 0.5, "serverapp": 0.2}
"""How often each kind of process is killed, against the others; without a SuperLink rounds stand
still for a minute."""
METRIC = "hits@10"


def main() -> None:
    """Run all, print JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument(
        "--cohort", type=int, default=16, help="clients of a round, few of them: rounds, not work"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="mean time between kills")
    parser.add_argument(
        "--deadline", type=float, default=4.0, help="seconds that a round waits for nodes"
    )
    parser.add_argument(
        "--every", type=float, default=60.0, help="seconds between two looks at memory and files"
    )
    parser.add_argument("--calm-seeds", type=int, default=5, help="undisturbed runs")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--port", type=int, default=23443)
    given = parser.parse_args()
    table = experiment(given.nodes, given.rounds)
    table["evaluation"]["final-users"] = 300
    table["sampler"]["cohort"] = given.cohort
    table["step"]["epochs"] = 1
    table["engine"] |= {"timeout": given.deadline, "max-failures": 1.0, "nodes": 1}
    with deployed(table, given.nodes, given.port) as (deployment, _):
        killer = Killer(deployment, given.seconds, given.seed)
        watcher = Watcher(deployment, given.every)
        disturbed = until_finished(deployment, table, "disturbed", killer, watcher)
        say("disturbed", kills=killer.kills, **rounds_of(disturbed))
        say("disturbed, for all users", **rounds_of(of_everyone(disturbed, table)))
    for seed in range(given.calm_seeds):
        say("calm", seed=seed, **rounds_of(calm(table, given.nodes, seed)))


def say(what: str, **values: object) -> None:
    """One line of JSON."""
    print(json.dumps({"what": what, "time": time.strftime("%H:%M:%S"), **values}), flush=True)


def rounds_of(result: Result) -> dict[str, float]:
    """A run's length, its clients per round, and its final metric."""
    clients = float(result.rounds["num-clients"].mean())
    return {
        "rounds": len(result.rounds),
        "clients per round": clients,
        METRIC: result.metrics[METRIC],
    }


class Killer:
    """Kills a process now and then.

    Args:
        deployment: whose processes.
        seconds: mean time between two kills.
        seed: of the choice.
    """

    def __init__(self, deployment: Deployment, seconds: float, seed: int) -> None:
        self.deployment = deployment
        self.seconds = seconds
        self.random = random.Random(seed)
        self.kills: dict[str, int] = {}
        self.ends = threading.Event()

    def run(self) -> None:
        """Kill processes until stopped."""
        while not self.ends.wait(self.random.expovariate(1 / self.seconds)):
            kind = self.random.choices(list(KILLED), list(KILLED.values()))[0]
            pid = self._pid(kind)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.kills[kind] = self.kills.get(kind, 0) + 1

    def _pid(self, kind: str) -> int | None:
        try:
            if kind in ("supernode", "executor"):
                file = self.deployment.logs / "nodes" / "processes.json"
                running = json.loads(file.read_text())["processes"]
                names = sorted(name for name in running if name.endswith(kind))
                return running[self.random.choice(names)]["pid"]
            pids = {state.name: state.pid for state in operator.states(self.deployment)}
            if kind != "serverapp":
                return pids[kind]
            # the executor's children: the run, not what starts it
            apps = tree(pids["serverapp"] or 0)[1:]
            return apps[0] if apps else None
        except (OSError, ValueError, KeyError, IndexError):
            return None


class Watcher:
    """Prints memory, open files and sizes on disk now and then.

    Args:
        deployment: whose processes.
        seconds: time between two looks.
    """

    def __init__(self, deployment: Deployment, seconds: float) -> None:
        self.deployment = deployment
        self.seconds = seconds
        self.ends = threading.Event()

    def run(self) -> None:
        """Monitor until stopped."""
        while not self.ends.wait(self.seconds):
            self.look()

    def look(self) -> None:
        """One line."""
        file = self.deployment.path / "runs" / "disturbed" / "rounds.csv"
        done = max(0, len(file.read_text().splitlines()) - 1) if file.exists() else 0
        found = {name: round(value, 1) for name, value in memory(self.deployment).items()}
        say(
            "watch",
            rounds=done,
            **{f"{name} MiB": value for name, value in found.items()},
            **sizes(self.deployment),
        )


def until_finished(
    deployment: Deployment, table: dict, name: str, killer: Killer, watcher: Watcher
) -> Result:
    """A run to its end, resumed whenever its ServerApp is lost."""
    folder = RunFolder.create(launch.settled(table), deployment.path / "runs" / name)
    watcher.look()
    for daemon in (killer.run, watcher.run):
        threading.Thread(target=daemon, daemon=True).start()
    try:
        while True:
            try:
                return launch.wait(deployment, folder, launch.start(deployment, folder))
            except EngineError as error:
                say("resumed", why=str(error).splitlines()[0])
                # the ServerApp, or the SuperLink while it was asked: go on from the last checkpoint
                time.sleep(2)
    finally:
        killer.ends.set()
        watcher.ends.set()
        watcher.look()
        say("machine", **load_of())


def calm(table: dict, nodes: int, seed: int) -> Result:
    """The same experiment with another seed, as a simulation."""
    settings = copy.deepcopy(table)
    settings["seed"] = seed
    settings["engine"] |= {"name": "serial", "nodes": nodes}
    with tempfile.TemporaryDirectory() as folder:
        return runner.run(settings, output=Path(folder) / "run")


def of_everyone(result: Result, table: dict) -> Result:
    """Metrics of a run's final parameters for all users, evaluated in a simulation, because a
    deployment evaluates only users of connected nodes."""
    settings = copy.deepcopy(table)
    settings["engine"] |= {"name": "serial"}
    run = RunFolder(result.folder)
    state = Checkpoints(run.checkpoints, run.experiment.digest(), keep=2).latest()
    if state is None:
        raise EngineError(
            f"{run.path} has no checkpoint", expected="that of its last round", got="none"
        )
    with tempfile.TemporaryDirectory() as folder:
        copied = RunFolder.create(runner.settle(load(settings)), Path(folder) / "run")
        Checkpoints(copied.checkpoints, copied.experiment.digest(), keep=2).save(state)
        return runner.execute(copied)


def sizes(deployment: Deployment) -> dict[str, int]:
    """Open files and processes of the server and the nodes; KiB of the SuperLink's database and of
    logs."""
    pids = {state.name: state.pid for state in operator.states(deployment) if state.pid}
    found = {}
    for name in ("superlink", "gateway", "serverapp", "nodes"):
        family = tree(pids[name]) if name in pids else []
        found |= {
            f"{name} files": sum(_open_files(pid) for pid in family),
            f"{name} processes": len(family),
        }
    parts = deployment.server.glob("superlink.db*")
    logs = deployment.logs.rglob("*.txt")
    return {**found, "database KiB": _kib(parts), "logs KiB": _kib(logs)}


def _kib(files) -> int:
    return sum(file.stat().st_size for file in files) // 1024


def _open_files(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


if __name__ == "__main__":
    main()
