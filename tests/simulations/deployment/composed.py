# SPDX-License-Identifier: Apache-2.0
"""A deployment in real containers for tests, with functions to kill them."""

import json
import os
import shutil
import signal
import subprocess

import pytest
import tomli_w
import yaml

from fedrec.experiment.schema import load
from simulations import runner
from simulations.deployment import launch
from simulations.deployment.layout import DeploymentConfig, initialise
from simulations.deployment.shards import cut_for
from tests.runs import parameters_in
from tests.simulations.deployment.federation import allow_any_number_of_runs, free_ports, until

IMAGE = "fedrec:0.1.0"
RUNS = "/var/lib/fedrec/runs"
OFTEN = "docker-compose.override.yml"  # which docker compose reads unless other files are named


def skip_without_an_engine():
    """Return the command of docker compose; skip without a Docker engine, its images or docker
    compose."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True).returncode
    ):
        pytest.skip("no Docker engine runs here")
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode:
        pytest.skip(f"the Docker engine has no image {IMAGE}")
    for command in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True).returncode
        ):
            return command
    pytest.skip("there is no docker compose")


class Composed:
    """A deployment whose processes are containers; nodes hold the shards of an experiment's
    dataset."""

    def __init__(self, path, table, command, nodes=2):
        self.path, self.table, self._command = path, table, command
        made = initialise(path, DeploymentConfig.parse({"nodes": nodes, "port": free_ports(1)[0]}))
        (path / "experiment.toml").write_text(tomli_w.dumps(table))
        allow_any_number_of_runs(cut_for(made, load(table)))
        self._project = f"fedrec-test-{os.getpid()}"
        self._look_often()

    def _look_often(self):
        """Check the containers' health every four seconds, because each waits for others to be
        healthy; more often takes a core from what they start."""
        table = yaml.safe_load((self.path / "docker-compose.yml").read_text())
        often = {
            name: {"healthcheck": {**service["healthcheck"], "interval": "4s", "retries": 30}}
            for name, service in table["services"].items()
            if "healthcheck" in service
        }
        own = {key: table[key] for key in ("version",) if key in table}
        (self.path / OFTEN).write_text(yaml.safe_dump({**own, "services": often}))

    def compose(self, *arguments, timeout=300):
        """Run a command of docker compose; returns its exit status and output."""
        done = subprocess.run(
            [*self._command, "-p", self._project, *map(str, arguments)],
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return done.returncode, done.stdout

    def done(self, *arguments, timeout=300):
        """The output of a command that must succeed."""
        status, output = self.compose(*arguments, timeout=timeout)
        assert status == 0, output
        return output

    def operator(self, *arguments, timeout=300):
        """A command of the operator, such as `deploy register /deployment`."""
        return self.compose("run", "--rm", "-T", "operator", "deploy", *arguments, timeout=timeout)

    def run(self, name, *overrides, timeout=300):
        """Run an experiment; returns the exit status and output."""
        return self.operator(*self._run(name, overrides), timeout=timeout)

    def start_run(self, name, *overrides):
        """Start an experiment in the background."""
        arguments = ["run", "--rm", "-T", "operator", "deploy", *self._run(name, overrides)]
        return subprocess.Popen(
            [*self._command, "-p", self._project, *arguments],
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _run(self, name, overrides):
        changes = [word for change in overrides for word in ("--set", change)]
        return [
            "run",
            "/deployment",
            "/deployment/experiment.toml",
            "-o",
            f"{RUNS}/{name}",
            *changes,
        ]

    def container(self, service):
        """The engine's information about a service's container."""
        identifier = self.done("ps", "-q", service).strip()
        return json.loads(subprocess.check_output(["docker", "inspect", identifier]))[0]

    def kill(self, service):
        """Kill the processes of a container from outside; after `docker kill` it would not be
        restarted."""
        os.kill(self.container(service)["State"]["Pid"], signal.SIGKILL)

    def is_back(self, service, after):
        """Whether a killed container runs again; `after` is its earlier number of restarts."""
        state = self.container(service)
        return state["RestartCount"] > after and state["State"]["Running"]

    def copy(self, name, to):
        """A copy of a run folder out of its volume."""
        source = f"{self.container('serverapp')['Id']}:{RUNS}/{name}"
        subprocess.run(["docker", "cp", source, str(to)], check=True, capture_output=True)
        return to

    def rounds(self, name):
        """Rounds that the run folder reports."""
        status, output = self.compose("exec", "-T", "serverapp", "cat", f"{RUNS}/{name}/rounds.csv")
        return max(0, len(output.splitlines()) - 1) if status == 0 else 0

    def simulated(self, folder, *overrides):
        """Parameters of the same run as a simulation."""
        table = launch.settled(self.table, overrides).table()
        table["engine"] |= {"name": "serial", "nodes": 2}
        runner.run(table, output=folder)
        return parameters_in(folder)

    def well(self):
        """Names of the services whose containers report that they are healthy."""
        found = subprocess.run(
            [
                *("docker", "ps", "--filter", f"label=com.docker.compose.project={self._project}"),
                *("--filter", "health=healthy"),
                *("--format", '{{.Label "com.docker.compose.service"}}'),
            ],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return set(found.stdout.split())

    def wait_until(self, condition, what, timeout=600):
        """Wait for containers; each executor compiles the kernel at its first start, a minute of a
        core."""
        until(condition, timeout, what=what, pause=1.0)

    def down(self):
        return self.compose("down", "--volumes", "--timeout", "10")
