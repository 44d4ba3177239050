# SPDX-License-Identifier: Apache-2.0
"""A deployment on loopback for tests: real processes with the flags of a real one, and hands to kill them with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import tomli_w

from fedrec.experiment import load
from simulations.deploy import operator
from simulations.deploy.initialise import add_nodes, initialise
from simulations.deploy.layout import DeploymentConfig
from simulations.deploy.shards import cut

FEDREC = (sys.executable, "-m", "simulations.cli")


def free_ports(count):
    """So many ports that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Federation:
    """A deployment whose nodes hold the shards of an experiment's dataset."""

    def __init__(self, path, table, nodes=2, **settings):
        self.path, self.table = path, table
        door, superlink = free_ports(2)
        first = free_ports(1)[0]
        ports = {"port": door, "superlink-port": superlink, "node-port": first}
        self.deployment = initialise(
            path, DeploymentConfig.parse({"nodes": nodes, "proxy": "python", **ports, **settings})
        )
        self.experiment_file = path / "experiment.toml"
        self.experiment_file.write_text(tomli_w.dumps(table))
        cut(load(table), self.deployment.node_folders())
        self.others = []

    def up(self):
        operator.up(self.deployment)
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
        """`fedrec deploy run` in the background; its run folder is `runs/NAME`."""
        command = [*FEDREC, "deploy", "run", str(self.path), str(self.experiment_file), "-o", str(self.folder(name))]
        for text in overrides:
            command += ["--set", text]
        return self.start(command)

    def run(self, name, *overrides, timeout=240):
        """`fedrec deploy run` to its end; gives its exit status and what it printed."""
        return self.finish(self.start_run(name, *overrides), timeout)

    def resume(self, name, timeout=240):
        return self.finish(self.start([*FEDREC, "deploy", "resume", str(self.path), str(self.folder(name))]), timeout)

    def start(self, command):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment()
        )
        self.others.append(process)
        return process

    @staticmethod
    def finish(process, timeout=240):
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"no end within {timeout} s:\n{output}") from None
        return process.returncode, output

    def client(self, number, *arguments, superlink=None):
        """`fedrec client` with the folder of a node, in the background."""
        command = [*FEDREC, "client", "--join", str(self.deployment.node(number)), *arguments]
        return self.start([*command, "--superlink", superlink or self.deployment.door, "--port", str(free_ports(1)[0])])

    def add_node(self):
        """A further node with registered keys; gives its number."""
        self.deployment = add_nodes(self.deployment, 1)
        operator.register_nodes(self.deployment)
        return self.deployment.settings.nodes

    def folder(self, name):
        return self.path / "runs" / name

    def log(self, name):
        file = self.folder(name) / "log.txt"
        return file.read_text() if file.exists() else ""

    def rounds(self, name):
        """Rounds that the run folder reports."""
        file = self.folder(name) / "rounds.csv"
        return max(0, len(file.read_text().splitlines()) - 1) if file.exists() else 0

    def parameters(self, name):
        """Parameters in the newest checkpoint, with numpy alone."""
        with np.load(max((self.folder(name) / "checkpoints").glob("round-*.npz"))) as file:
            return {key: file[key] for key in file.files if key.startswith("param")}

    def pid(self, name, node=None):
        """Process id of a server's process, or of a node's."""
        logs = self.deployment.logs if node is None else self.deployment.logs / "nodes"
        name = name if node is None else f"node-{node}/{name}"
        return json.loads((logs / "processes.json").read_text())["processes"][name]["pid"]

    def kill(self, name, node=None):
        os.kill(self.pid(name, node), signal.SIGKILL)

    def control(self):
        from simulations.deploy.flwr_private import Control

        return closing(Control(self.deployment.superlink, self.deployment.authority))

    def online(self):
        with self.control() as control:
            return sum(node.status == "online" for node in control.nodes())

    def stop_runs(self):
        with self.control() as control:
            for run in control.runs():
                if not run.status.startswith("finished"):
                    control.stop(run.run)


def until(condition, timeout=120, what="it"):
    """Wait until something is true."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"{what} did not happen within {timeout} s")
