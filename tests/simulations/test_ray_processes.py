# SPDX-License-Identifier: Apache-2.0
"""A local Ray has the processes that it needs. If a new version of Ray fails here, fix
`simulations/engines/ray_processes.py`."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from simulations.engines.ray_processes import few_processes

pytestmark = [pytest.mark.timeout(280), pytest.mark.ray]
ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from simulations.engines.ray import alone, connect
with alone():
    import ray
    connect(None, 1, 2**26)
    assert ray.get(ray.remote(lambda: 5).remote()) == 5
    print("ready", flush=True)
    sys.stdin.readline()
    ray.shutdown()
print("closed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_neither_monitors_nor_agents_run_and_none_stays(killed):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", RUN]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()[-2000:]
            below = psutil.Process(process.pid).children(recursive=True)
            names = (os.path.basename(child.cmdline()[0].split()[0]) for child in below)
            workers = ("ray::", "python")  # a worker names itself after its start
            others = sorted(name for name in names if not name.startswith(workers))
            assert others == ["cat", "cat", "gcs_server", "raylet"]
            if not killed:
                output, errors = process.communicate("\n", timeout=60)
                assert output == "closed\n", errors[-2000:]
        finally:
            process.kill()
    until = time.monotonic() + 60
    while any(child.is_running() and child.status() != "zombie" for child in below):
        assert time.monotonic() < until, below
        time.sleep(0.1)


def test_ray_has_what_is_replaced_and_gets_it_back(monkeypatch):
    from ray._private import node, services

    before = (node.Node.start_monitor, node.Node.start_log_monitor, node.Node.start_api_server)
    start = services.start_ray_process
    with few_processes():
        assert node.Node.start_monitor is not before[0] and services.start_ray_process is not start
    assert node.Node.start_api_server is before[2] and services.start_ray_process is start
    # workers that get an environment need the agents
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with few_processes():
        assert node.Node.start_log_monitor is before[1]
