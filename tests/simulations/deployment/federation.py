# SPDX-License-Identifier: Apache-2.0
"""A deployment on loopback for tests: real processes with real flags, and functions to kill
them."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import httpx
import pandas as pd
import tomli_w

from fedrec.errors import FedrecError
from fedrec.experiment.schema import load
from fedrec.runs.folder import RunFolder
from server.deployed.discovery import _read_roster
from simulations import runner
from simulations.deployment import launch, operator
from simulations.deployment.layout import DeploymentConfig, add_nodes, initialise
from simulations.deployment.shards import cut_for
from tests.runs import parameters_in
from tests.simulations.helpers import parent_of

FEDREC = (sys.executable, "-m", "simulations.cli")


def free_ports(count):
    """A number of consecutive free ports, outside those that the system uses for outgoing
    connections."""
    for _ in range(200):
        ports = range(first := random.randrange(10_000, 32_000 - count), first + count)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in ports:
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(ports)
    raise AssertionError("no free ports on 127.0.0.1")


def allow_any_number_of_runs(deployment):
    """Shards allow ten runs of their experiment; several tests share a deployment."""
    for folder in deployment.node_folders():
        file = folder / "node.toml"
        many = {"most-rounds": 100_000, "most-evaluations": 100_000}
        file.write_text(tomli_w.dumps(tomllib.loads(file.read_text()) | many))


class Federation:
    """A deployment whose nodes hold the shards of an experiment's dataset."""

    def __init__(self, path, table, nodes=2, **settings):
        self.path, self.table = path, table
        gateway, superlink, first, *_ = free_ports(nodes + 2)
        ports = {"port": gateway, "superlink-port": superlink, "node-port": first}
        self.deployment = initialise(
            path, DeploymentConfig.parse({"nodes": nodes, **ports, **settings})
        )
        self.experiment_file = path / "experiment.toml"
        self.experiment_file.write_text(tomli_w.dumps(table))
        # so that a malicious node can send false replies
        self.deployment = cut_for(self.deployment, load(table)).changed(most_clients=100)
        allow_any_number_of_runs(self.deployment)
        self.others = []

    def up(self):
        operator.up(self.deployment, wait=300)
        return self

    def down(self):
        for other in self.others:
            if other.poll() is None:
                other.terminate()
        for other in self.others:
            try:
                other.wait(timeout=20)
            except subprocess.TimeoutExpired:
                other.kill()
        operator.down(self.deployment)

    def environment(self):
        root = str(Path(__file__).resolve().parents[3])
        return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}

    def start_run(self, name, *overrides):
        """Submit a run to the SuperLink, like `fedrec deploy run`; its run folder is
        `runs/NAME`."""
        folder = RunFolder.create(launch.settled(self.table, overrides), self.folder(name))
        return Run(folder, launch.start(self.deployment, folder))

    def start_again(self, name):
        """Submit an interrupted run to the SuperLink, like `fedrec deploy resume`."""
        folder = launch.resumable(self.folder(name))
        return Run(folder, launch.start(self.deployment, folder))

    def wait_for(self, run, timeout=400):
        """Wait for a run's end; returns whether it finished, and the reason if not."""
        until(
            lambda: self._status(run).startswith("finished"),
            timeout,
            what=f"the end of {run.folder.path.name}",
        )
        try:
            launch.wait(self.deployment, run.folder, run.identifier)
        except FedrecError as error:
            return False, str(error)
        return True, run.folder.log_file.read_text()

    def run(self, name, *overrides, timeout=400):
        """Run an experiment; returns whether it finished, and the reason if not."""
        return self.wait_for(self.start_run(name, *overrides), timeout)

    def must_finish(self, run):
        """The log of a run, which must finish."""
        good, why = self.wait_for(run)
        assert good, why
        return why

    def must_run(self, name, *overrides):
        """The log of an experiment, which must run to its end."""
        return self.must_finish(self.start_run(name, *overrides))

    def _status(self, run):
        with self.control() as control:
            return next(
                (state.status for state in control.runs() if state.run == run.identifier), "unknown"
            )

    def command(self, *arguments):
        """A command of `fedrec deploy` in the background."""
        return self.start([*FEDREC, "deploy", *map(str, arguments)])

    def simulated(self, folder, *overrides):
        """Parameters of the same run as a simulation, without faults and on another engine."""
        table = launch.settled(self.table, overrides).table()
        table["engine"] |= {"name": "serial", "nodes": 2}
        runner.run(table, output=folder)
        return parameters_in(folder)

    def start(self, command):
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(),
        )
        self.others.append(process)
        return process

    @staticmethod
    def finish(process, timeout=400):
        """Wait for the end of a command; returns its exit status and output."""
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"no end within {timeout} s:\n{output}") from None
        return process.returncode, output

    def client(self, folder, *arguments, superlink=None):
        """`fedrec client` with the folder of a node, in the background; its process, and the log of
        its SuperNode."""
        where = ["--superlink", superlink or self.deployment.gateway]
        command = [*FEDREC, "client", "--join", folder, *where, "--port", free_ports(1)[0]]
        process = self.start([str(part) for part in (*command, *arguments)])
        return process, folder / "state" / "logs" / "supernode.txt"

    def copied(self, number, target):
        """The folder of a node on another machine: its key and data, without its state."""
        node = self.deployment.node(number)
        return shutil.copytree(node, target, ignore=shutil.ignore_patterns("state"))

    def add_node(self):
        """Add a node with registered keys; returns its number."""
        self.deployment = add_nodes(self.deployment, 1)
        operator.register_nodes(self.deployment)
        return self.deployment.settings.nodes

    def folder(self, name):
        return self.path / "runs" / name

    def roster(self, name):
        """The clients of each node of a run that train, by Flower's node ids."""
        found = _read_roster(self.folder(name) / "roster.npz")
        return {node: presence.training.tolist() for node, presence in found.items()}

    def log(self, name):
        file = self.folder(name) / "log.txt"
        return file.read_text() if file.exists() else ""

    def rounds(self, name):
        """Rounds that the run folder reports."""
        file = self.folder(name) / "rounds.csv"
        return max(0, len(file.read_text().splitlines()) - 1) if file.exists() else 0

    def parameters(self, name):
        """Parameters in the newest checkpoint, with numpy alone."""
        return parameters_in(self.folder(name))

    def clients(self, name):
        """Number of clients that answered, by round."""
        return pd.read_csv(self.folder(name) / "rounds.csv")["num-clients"].tolist()

    def charges(self, name):
        """Lines of the privacy ledger."""
        return (self.folder(name) / "privacy.jsonl").read_text().splitlines()

    def pid(self, name, node=None):
        """Process id of a server's process, or of a node's."""
        logs = self.deployment.logs if node is None else self.deployment.logs / "nodes"
        name = name if node is None else f"node-{node}/{name}"
        return json.loads((logs / "processes.json").read_text())["processes"][name]["pid"]

    def answers(self, name):
        """Whether a killed process of the server has been restarted and is healthy."""
        found = next(state for state in operator.states(self.deployment) if state.name == name)
        return found.healthy and found.restarts > 0

    def kill(self, name, node=None):
        os.kill(self.pid(name, node), signal.SIGKILL)

    def children(self, name, node=None):
        """Process ids of the running children of a process."""
        parent = self.pid(name, node)
        return [
            int(file.parent.name)
            for file in Path("/proc").glob("[0-9]*/stat")
            if parent_of(file) == parent
        ]

    def control(self):
        from simulations.deployment.superlink import Control

        return Control(self.deployment)

    def online(self):
        with self.control() as control:
            return sum(node.status == "online" for node in control.nodes())

    def stop_runs(self):
        """End all runs."""
        until(lambda: not self._unfinished(stop=True), what="the end of all runs")

    def _unfinished(self, stop):
        with self.control() as control:
            found = [run.run for run in control.runs() if not run.status.startswith("finished")]
            for run in found if stop else ():
                control.stop(run)
            return found


@dataclass(frozen=True)
class Run:
    """A run on a federation."""

    folder: RunFolder
    identifier: int


def until(condition, timeout=240, what="it", pause=0.2):
    """Wait until something is true."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except (OSError, ValueError, KeyError, httpx.HTTPError):
            # for example while a process is being restarted
            pass
        time.sleep(pause)
    raise AssertionError(f"{what} did not happen within {timeout} s")
