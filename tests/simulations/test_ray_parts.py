# SPDX-License-Identifier: Apache-2.0
"""Parts of the Ray engine."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from simulations.engines.ray import _few_processes, alone, connect, started
from tests.simulations.helpers import listening_below, parent_of

# Actors that die while they start, on a local Ray.


def answering(error=None):
    """The class of an actor that answers, or fails in its constructor. Defined in a function,
    because Ray's processes cannot import this file."""

    class Answering:
        def __init__(self):
            if error is not None:
                raise error

        def ping(self):
            return "here"

    return Answering


@pytest.fixture(scope="module")
def ray():
    with alone():
        import ray

        connect(None, 3, 0)
        yield ray
        ray.shutdown()


class Starter:
    """Starts actors, and kills those with the indices in `victims` immediately, the given number of
    times."""

    def __init__(self, ray, victims, error=None):
        self.ray, self.victims, self.started = ray, dict(victims), []
        self.actor = ray.remote(num_cpus=0)(answering(error))

    def __call__(self, index):
        actor = self.actor.remote()
        self.started.append(index)
        if self.victims.get(index, 0):
            self.victims[index] -= 1
            self.ray.kill(actor)
        return actor

    def actors(self, count):
        return started({index: self(index) for index in range(count)}, self)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_an_actor_that_died_before_it_ran_is_started_again(ray):
    start = Starter(ray, {1: 2})
    actors = start.actors(3)
    assert ray.get([actor.ping.remote() for actor in actors.values()]) == ["here"] * 3
    assert start.started == [0, 1, 2, 1, 1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("victims", "error", "starts", "words"),
    [({0: 9}, None, 3, "died"), ({}, ValueError("no such module"), 1, "no such module")],
)
def test_tries_are_bounded_and_a_failed_constructor_has_one(ray, victims, error, starts, words):
    start = Starter(ray, victims, error)
    (actor,) = start.actors(1).values()
    assert len(start.started) == starts
    with pytest.raises(ray.exceptions.ActorDiedError, match=words):
        ray.get(actor.ping.remote())


@pytest.mark.timeout(120)
def test_an_actor_without_a_core_is_waited_for_with_patience(ray):
    def start(index):
        return ray.remote(num_cpus=99)(answering()).remote()

    assert len(started({0: start(0)}, start, patience=0.2)) == 1


# A local Ray is restricted to its user: no other process of the machine can connect, at any
# address.

ROOT = Path(__file__).resolve().parents[2]
VICTIM = """
import os, sys
from simulations.engines.ray import alone, _has_token
with alone():
    import ray
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    assert _has_token()
    niceness = os.nice(0)  # a round waits for the slowest node
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == niceness
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.readline()
    ray.shutdown()
assert not [name for name in os.environ if name.startswith("RAY_AUTH")]
print("closed")
"""
STRANGER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("IN", ray.get(ray.remote(lambda: 5).remote(), timeout=20))
"""


def python(code, *arguments, home, **more):
    """A Python like that of another user: another home, and an environment without Ray's
    variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    own = {"HOME": str(home), "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, text=True, env={**environment, **own, **more}, **pipes)


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    """The address of a running Ray."""
    process = python(VICTIM, home=tmp_path_factory.mktemp("home"))
    address = process.stdout.readline().strip()
    assert address, process.stderr.read()[-2000:]
    yield process, address
    output, errors = process.communicate("\n", timeout=60)
    assert "closed" in output, errors[-2000:]


@pytest.mark.timeout(280)
@pytest.mark.ray
@pytest.mark.slow
def test_another_process_without_the_token_runs_no_code(victim, tmp_path):
    """With the token it can connect; without it Ray retries, and gives up after minutes."""
    process, address = victim
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"RAY_AUTH" not in environment  # of the process as it was started; its own Ray's have it
    tokens = {
        "friend": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token_of_a_child(process.pid)},
        "none": {},
        "wrong": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
    }
    # otherwise Ray would look for it at another address
    reachable = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    asking = {
        name: python(STRANGER, address, home=tmp_path, **reachable, **own)
        for name, own in tokens.items()
    }
    try:
        assert asking["friend"].communicate(timeout=120)[0] == "IN 5\n"
        time.sleep(3)
        for name in ("none", "wrong"):
            asking[name].kill()
            assert "IN" not in asking[name].communicate()[0], name
    finally:
        for other in asking.values():
            other.kill()
            other.wait()


def _token_of_a_child(pid):
    """From the environment of one of Ray's processes, which only their user can read."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        if parent_of(file) == pid:
            for pair in (file.parent / "environ").read_bytes().split(b"\0"):
                if pair.startswith(b"RAY_AUTH_TOKEN="):
                    return pair.partition(b"=")[2].decode()
    raise AssertionError("no process of Ray's has a token")


@pytest.mark.timeout(280)
@pytest.mark.ray
@pytest.mark.slow
def test_it_listens_on_loopback_alone(victim):
    process, address = victim
    assert address.startswith("127.0.0.1:")
    own, others = listening_below(process.pid)
    assert own and not others, others


AFTER_OTHER_USE = """
import ray
quiet = dict(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
def use():
    assert ray.get(ray.remote(lambda: 5).remote()) == 5
    ray.shutdown()
ray.init(address="local", **quiet)
use()
from simulations.engines.ray import alone, _has_token
with alone():
    ray.init(address="local", **quiet)
    assert _has_token()
    use()
assert not _has_token()
ray.init(address="local", **quiet)
use()
print("used")
"""


@pytest.mark.timeout(280)
@pytest.mark.ray
@pytest.mark.slow
def test_ray_may_have_been_used_before_and_may_be_used_afterwards(tmp_path):
    """Ray reads its authentication mode when it is imported."""
    output, errors = python(AFTER_OTHER_USE, home=tmp_path).communicate(timeout=240)
    assert output == "used\n", errors[-2000:]


@pytest.mark.timeout(280)
@pytest.mark.ray
def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for name in ("RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.delenv(name, raising=False)  # of a Ray that another test has started
    with alone():
        assert os.environ["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN" not in os.environ
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ


# A local Ray has the processes that it needs. If a new version of Ray fails here, fix
# `simulations/engines/ray.py`.

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


@pytest.mark.timeout(280)
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_neither_monitors_nor_agents_run_and_none_stays(tmp_path, killed):
    with python(RUN, home=tmp_path) as process:
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
    assert not psutil.wait_procs(below, timeout=60)[1]


@pytest.mark.timeout(280)
@pytest.mark.ray
def test_ray_has_what_is_replaced_and_gets_it_back(monkeypatch):
    from ray._private import node, services

    before = (node.Node.start_monitor, node.Node.start_log_monitor, node.Node.start_api_server)
    start = services.start_ray_process
    with _few_processes():
        assert node.Node.start_monitor is not before[0] and services.start_ray_process is not start
    assert node.Node.start_api_server is before[2] and services.start_ray_process is start
    # workers that get an environment need the agents
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with _few_processes():
        assert node.Node.start_log_monitor is before[1]
