# SPDX-License-Identifier: Apache-2.0
"""A long run on a deployment whose processes are killed at random, against one that nobody disturbs.

    python -m benchmarks.soak --rounds 500 --nodes 8 --seconds 5

Every few seconds one of SuperNodes, executors, the door or the SuperLink gets SIGKILL, or (seldom) the ServerApp, whose
run is then resumed. Printed at the end: rounds, kills, memory and open files of the long-lived processes at the start
and at the end, and the final metrics of both runs. The disturbed run is repeated with further seeds of the experiment
by hand to see the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

from benchmarks.deployment import deployed, experiment, memory, tree
from fedrec.errors import EngineError
from fedrec.runs import Result, RunFolder
from simulations.deploy import launch, operator
from simulations.deploy.layout import Deployment


def main() -> None:
    """Run both, print one JSON table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="mean time between kills")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--port", type=int, default=29443)
    given = parser.parse_args()
    table = experiment(given.nodes, given.rounds)
    table["evaluation"]["final-users"] = 300
    table["engine"] |= {"timeout": 60.0, "max-failures": 1.0, "nodes": 1}
    with deployed(table, given.nodes, given.port) as (deployment, _):
        before = {**memory(deployment), **files(deployment)}
        killer = Killer(deployment, given.seconds, given.seed)
        disturbed = until_finished(deployment, table, "disturbed", killer)
        after = {**memory(deployment), **files(deployment)}
        calm = until_finished(deployment, table, "calm", None)
        print(
            json.dumps(
                {
                    "rounds": len(disturbed.rounds),
                    "kills": killer.kills,
                    "at the start": before,
                    "at the end": after,
                    "hits@10, disturbed": disturbed.metrics["hits@10"],
                    "hits@10, calm": calm.metrics["hits@10"],
                    "clients per round, disturbed": float(disturbed.rounds["num-clients"].mean()),
                    "clients per round, calm": float(calm.rounds["num-clients"].mean()),
                },
                indent=2,
            )
        )


_SHARES = {"supernode": 8.0, "executor": 8.0, "superlink": 1.0, "door": 1.0, "serverapp": 0.2}
"""How often each kind of process is killed, against the others."""


class Killer:
    """Kills a process now and then.

    Args:
        deployment: whose processes.
        seconds: mean time between two kills.
        seed: of the choice.
    """

    def __init__(self, deployment: Deployment, seconds: float, seed: int) -> None:
        self.deployment, self.seconds, self.random = deployment, seconds, random.Random(seed)
        self.kills: dict[str, int] = {}
        self._ends = threading.Event()

    def run(self) -> None:
        """Kill until told to stop."""
        while not self._ends.wait(self.random.expovariate(1 / self.seconds)):
            kind = self.random.choices(["supernode", "executor", "superlink", "door", "serverapp"], [8, 8, 1, 1, 0.2])[
                0
            ]
            pid = self._pid(kind)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.kills[kind] = self.kills.get(kind, 0) + 1

    def stop(self) -> None:
        """Kill no more."""
        self._ends.set()

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
            apps = tree(pids["serverapp"] or 0)[1:]  # the executor's children: the run, not what starts it
            return apps[0] if apps else None
        except (OSError, ValueError, KeyError, IndexError):
            return None


def until_finished(deployment: Deployment, table: dict, name: str, killer: Killer | None) -> Result:
    """A run to its end, resumed whenever its ServerApp is lost."""
    folder = RunFolder.create(launch.settled(table), deployment.path / "runs" / name)
    thread = threading.Thread(target=killer.run, daemon=True) if killer else None
    if thread is not None:
        thread.start()
    while True:
        try:
            result = launch.wait(deployment, folder, launch.start(deployment, folder))
            break
        except EngineError:
            time.sleep(2)  # the ServerApp, or the SuperLink while it was asked: go on from the last checkpoint
    if killer is not None:
        killer.stop()
    return result


def files(deployment: Deployment) -> dict[str, int]:
    """Open files of the SuperLink, the door and the nodes together, and size of the SuperLink's database in KiB."""
    pids = {state.name: state.pid for state in operator.states(deployment) if state.pid}
    found = {}
    for name in ("superlink", "door", "nodes"):
        found[f"{name} files"] = sum(_open_files(pid) for pid in tree(pids[name])) if name in pids else 0
    parts = deployment.server.glob("superlink.db*")
    return {**found, "database KiB": sum(part.stat().st_size for part in parts) // 1024}


def _open_files(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


if __name__ == "__main__":
    main()
