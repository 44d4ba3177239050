# SPDX-License-Identifier: Apache-2.0
"""A local Ray has the processes that it needs. If a new version of Ray fails here, fix
`simulations/engines/ray_processes.py`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.whole_run import descendants
from simulations.engines.ray_processes import few_processes

pytestmark = [pytest.mark.timeout(280), pytest.mark.ray]
ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from simulations.engines.ray import connect
from simulations.engines.ray_alone import alone
with alone():
    import ray
    connect(None, 1, 2**26)
    assert ray.get(ray.remote(lambda: 5).remote()) == 5
    print("ready", flush=True)
    sys.stdin.readline()
    ray.shutdown()
print("closed")
"""


@pytest.fixture
def run(tmp_path):
    """A process with a local Ray, and the processes below it by what they run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()[-2000:]
        below = {one: _program(one) for one in descendants(process.pid) if one != process.pid}
        yield process, below
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_neither_monitors_nor_agents_run(run):
    process, below = run
    kinds = sorted(name for name in below.values() if not name.startswith("ray::"))
    assert kinds == ["cat", "cat", "gcs_server", "raylet"]
    output, errors = process.communicate("\n", timeout=60)
    assert output == "closed\n", errors[-2000:]
    assert _ended(below)


@pytest.mark.slow
def test_nothing_stays_when_the_run_is_killed(run):
    process, below = run
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert _ended(below)


def test_ray_has_what_is_replaced():
    from ray._private import node, services, worker

    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        assert callable(getattr(node.Node, name, None)), f"ray: Node.{name} is gone"
    assert callable(services.start_ray_process) and callable(worker._maybe_modify_runtime_env)


def test_in_an_environment_that_an_agent_makes_all_processes_are_started(monkeypatch):
    from ray._private import node

    before = node.Node.start_monitor
    with few_processes():
        assert node.Node.start_monitor is not before
    assert node.Node.start_monitor is before
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with few_processes():
        assert node.Node.start_monitor is before


def _program(process):
    title, *arguments = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    if any(one.endswith("/default_worker.py") for one in arguments):
        return "ray::starting"  # a worker names itself after its start
    return os.path.basename(title.split()[0])


def _ended(processes):
    until = time.monotonic() + 60
    while any(_runs(process) for process in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
