# SPDX-License-Identifier: Apache-2.0
"""Parts of the Ray engine."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import TimeoutError
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from benchmarks.processes import TreeWatch
from fedrec.errors import ClientError
from fedrec.protocol.serialization import to_record, zero_copy_arrays
from fedrec.runtime.shared_memory import offered
from simulations.engines import ray as ray_alone
from simulations.engines import reply_buffers
from simulations.engines.grid import identify_server, number
from simulations.engines.process_groups import few_processes
from simulations.engines.ray import Placement, alone, connect
from simulations.engines.reply_buffers import BufferPool, ReplyBuffer, put
from simulations.engines.serial import NodeThread
from tests.runs import assert_close
from tests.simulations.listening import listening_below, parent_of

# The node of a grid that is in a thread of this process.


@pytest.fixture
def message():
    identify_server()

    def made(identifier):
        message = Message(RecordDict(), 2, "train")
        number(message, identifier)
        return message

    return made


@pytest.fixture
def started():
    """Starts threads, and stops them."""
    threads = []

    def start(work):
        threads.append(NodeThread(work))
        return threads[-1]

    yield start
    for thread in threads:
        thread.close()


def answered(message):
    return Message(RecordDict(), reply_to=message)


@pytest.mark.timeout(60)
def test_messages_are_answered_one_after_the_other_in_another_thread(started, message):
    names, running = [], threading.Lock()

    def work(given):
        assert running.acquire(blocking=False)
        names.append((given.metadata.message_id, threading.current_thread()))
        running.release()
        return answered(given)

    thread = started(work)
    answers = [thread.send(message(name)).result(30) for name in "abc"]
    assert [answer.message.metadata.reply_to_message_id for answer in answers] == list("abc")
    assert [name for name, _ in names] == list("abc")
    assert len({worker for _, worker in names} | {threading.current_thread()}) == 2


@pytest.mark.timeout(60)
def test_errors_are_answers(started, message):
    raised = iter([ClientError("a client failed"), ValueError("a defect"), KeyboardInterrupt()])

    def work(given):
        raise next(raised)

    thread = started(work)
    said = [thread.send(message(name)).result(30).message for name in "abc"]
    assert all(reply.has_error() for reply in said)
    reasons = [reply.error.reason for reply in said]
    assert reasons[0].startswith("a client failed")
    assert "Traceback" in reasons[1] and "ValueError: a defect" in reasons[1]
    assert reasons[2].startswith("KeyboardInterrupt (")


@pytest.mark.timeout(60)
def test_the_sender_need_not_wait(started, message):
    released = threading.Event()

    def work(given):
        released.wait(50)
        return answered(given)

    answer = started(work).send(message("a"))
    with pytest.raises(TimeoutError):
        answer.result(0.05)
    released.set()
    assert not answer.result(30).message.has_error()


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
    """Starts actors, and kills those at the places in `victims` immediately, the given number of
    times."""

    def __init__(self, ray, victims, error=None):
        self.ray, self.victims, self.started = ray, dict(victims), []
        self.actor = ray.remote(num_cpus=0)(answering(error))

    def __call__(self, place):
        actor = self.actor.remote()
        self.started.append(place)
        if self.victims.get(place, 0):
            self.victims[place] -= 1
            self.ray.kill(actor)
        return actor


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_an_actor_that_died_before_it_ran_is_started_again(ray):
    start = Starter(ray, {1: 2})
    placement = Placement(start, range(3))
    actors = placement.started()
    assert ray.get([actor.ping.remote() for actor in actors.values()]) == ["here"] * 3
    assert start.started == [0, 1, 2, 1, 1]


@pytest.mark.timeout(120)
def test_tries_are_bounded(ray):
    start = Starter(ray, {0: 9})
    (actor,) = Placement(start, range(1)).started().values()
    assert start.started == [0, 0, 0]
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(actor.ping.remote())


@pytest.mark.timeout(120)
def test_an_actor_whose_constructor_failed_is_not_restarted(ray):
    start = Starter(ray, {}, ValueError("no such module"))
    (actor,) = Placement(start, range(1)).started().values()
    assert start.started == [0]
    with pytest.raises(ray.exceptions.ActorDiedError, match="no such module"):
        ray.get(actor.ping.remote())


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_an_actor_that_dies_later_is_not_started_again(ray):
    start = Starter(ray, {})
    placement = Placement(start, range(1))
    (actor,) = placement.started().values()
    ray.kill(actor)
    with pytest.raises(ray.exceptions.ActorDiedError):
        for _ in range(200):  # it may answer once more: `kill` does not wait for the end
            ray.get(actor.ping.remote())
            time.sleep(0.05)
    assert placement.started() == {0: actor} and start.started == [0]


@pytest.mark.timeout(120)
def test_an_actor_without_a_core_is_waited_for_with_patience(ray):
    def start(place):
        return ray.remote(num_cpus=99)(answering()).remote()

    assert len(Placement(start, range(1), patience=0.2).started()) == 1


# A local Ray is restricted to its user: no other process of the machine can connect, at any
# address.

ROOT = Path(__file__).resolve().parents[2]
VICTIM = """
import os, sys
from simulations.engines.ray import alone, has_token
with alone():
    import ray
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    assert has_token()
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
    environment |= {
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        **more,
    }
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


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
from simulations.engines.ray import alone, has_token
with alone():
    ray.init(address="local", **quiet)
    assert has_token()
    use()
assert not has_token()
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
    with ray_alone.alone():
        assert os.environ["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN" not in os.environ
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ


# A local Ray has the processes that it needs. If a new version of Ray fails here, fix
# `simulations/engines/process_groups.py`.

RUN = """
import sys
from simulations.engines.ray import connect
from simulations.engines.ray import alone
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
        tree = TreeWatch(process).sample()
        below = {number: _program(number) for number in tree if number != process.pid}
        yield process, below
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(280)
@pytest.mark.ray
@pytest.mark.slow
def test_neither_monitors_nor_agents_run(run):
    process, below = run
    kinds = sorted(name for name in below.values() if not name.startswith("ray::"))
    assert kinds == ["cat", "cat", "gcs_server", "raylet"]
    output, errors = process.communicate("\n", timeout=60)
    assert output == "closed\n", errors[-2000:]
    assert _ended(below)


@pytest.mark.timeout(280)
@pytest.mark.ray
@pytest.mark.slow
def test_nothing_stays_when_the_run_is_killed(run):
    process, below = run
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert _ended(below)


@pytest.mark.timeout(280)
@pytest.mark.ray
def test_ray_has_what_is_replaced():
    from ray._private import node, services, worker

    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        assert callable(getattr(node.Node, name, None)), f"ray: Node.{name} is gone"
    assert callable(services.start_ray_process) and callable(worker._maybe_modify_runtime_env)


@pytest.mark.timeout(280)
@pytest.mark.ray
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


# Reply buffers: arrays are returned unchanged, and no buffer is written while it is still read.


def content(*arrays):
    return RecordDict(
        {"arrays": to_record({f"a{place}": array for place, array in enumerate(arrays)})}
    )


ORDER = content(np.zeros((400, 100), np.float32), np.zeros(3))


def answer(seed=0):
    random = np.random.default_rng(seed)
    table = random.normal(size=(100, 400)).astype(np.float32)
    return content(
        table,
        table.T[3:9],
        np.arange(5),
        np.float64(2.5),
        np.zeros((0, 4)),
        np.array([True, False]),
    )


def copies(found):
    return {name: np.array(array) for name, array in zero_copy_arrays(found["arrays"]).items()}


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.skipif(not offered(), reason="this system has no anonymous shared files")
def test_a_reply_is_unchanged_and_read_only():
    pool, sent = BufferPool(), answer()
    sent["metrics"], expected = MetricRecord({"n": 1}), copies(sent)
    memory = pool.buffer(ORDER)
    spots = put(sent, memory.assign())
    assert set(sent) == {"metrics"}
    found = memory.take_back(pickle.loads(pickle.dumps(spots)))
    arrays = zero_copy_arrays(found["arrays"])
    assert_equal(arrays, expected)
    assert not any(array.ctypes.data % 64 for array in arrays.values() if array.size), (
        "each begins a line of the cache"
    )
    with pytest.raises(ValueError, match="read-only"):
        arrays["a0"][0] = 1


@pytest.mark.skipif(not offered(), reason="this system has no anonymous shared files")
@pytest.mark.slow
def test_another_process_puts_it_there():
    memory = BufferPool().buffer(ORDER)
    program = (
        "import pickle, sys; from tests.simulations.test_ray_parts import answer; from"
        " simulations.engines.reply_buffers import"
        " put\nsys.stdout.buffer.write(pickle.dumps(put(answer(7), pickle.load(sys.stdin.buffer))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(memory.assign()),
        capture_output=True,
        check=True,
    )
    assert_equal(
        zero_copy_arrays(memory.take_back(pickle.loads(done.stdout))["arrays"]), copies(answer(7))
    )


@pytest.mark.skipif(not offered(), reason="this system has no anonymous shared files")
def test_a_buffer_is_used_again_when_nothing_of_the_last_answer_is_in_use():
    pool = BufferPool()
    first = pool.buffer(ORDER)
    spots = put(answer(), first.assign())
    assert not first.free and pool.buffer(ORDER) is not first, "an answer may still come"
    part = zero_copy_arrays(first.take_back(spots)["arrays"])["a0"][3:, 5].T
    kept = part.copy()
    second = pool.buffer(ORDER)
    assert not first.free and second is not first
    put(answer(1), second.assign())
    np.testing.assert_array_equal(part, kept)
    del part
    assert first.free and pool.buffer(ORDER) is first


@pytest.mark.skipif(not offered(), reason="this system has no anonymous shared files")
def test_a_buffer_that_brought_nothing_is_used_again():
    pool = BufferPool()
    memory = pool.buffer(ORDER)
    memory.assign()
    assert memory.take_back({}) == {} and pool.buffer(ORDER) is memory


@pytest.mark.skipif(not offered(), reason="this system has no anonymous shared files")
def test_memory_that_is_too_small_goes():
    open_files, pool = [], BufferPool()
    for size in (0, 10**5, 10**6, 10**5):
        pool.buffer(content(np.zeros(size, np.float32)))
        gc.collect()
        open_files.append(len(os.listdir("/proc/self/fd")))
    none, *one = open_files
    assert len(set(one)) == 1 and one[0] > none
    del pool
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == none


@pytest.mark.skipif(not offered(), reason="this system has no anonymous shared files")
def test_nodes_that_never_answer_use_no_more_than_some(monkeypatch):
    monkeypatch.setattr(reply_buffers, "_MOST", 3)
    pool, memories = BufferPool(), []
    for _ in range(3):
        memories.append(pool.buffer(ORDER))
        memories[-1].assign()
    assert pool.buffer(ORDER) is None
    memories[1].take_back({})
    assert pool.buffer(ORDER) is memories[1]


@pytest.mark.skipif(not offered(), reason="this system has no anonymous shared files")
def test_what_is_small_or_does_not_fit_stays_in_the_answer():
    pool = BufferPool()
    assert pool.buffer(content(np.zeros(10))) is None and pool.buffer(RecordDict()) is None
    memory = pool.buffer(ORDER)
    small, large = content(np.zeros(10)), content(np.zeros((400, 200), np.float32))
    for sent in (small, large, RecordDict({"metrics": MetricRecord({"n": 1})})):
        names = list(sent)
        assert put(sent, memory.assign()) == {} and list(sent) == names


@pytest.mark.skipif(not offered(), reason="this system has no anonymous shared files")
def test_records_of_flowers_own_arrays_come_back_too():
    memory, table = BufferPool().buffer(ORDER), np.random.default_rng(0).normal(size=(200, 100))
    found = memory.take_back(put(RecordDict({"parameters": ArrayRecord([table])}), memory.assign()))
    (own,) = found["parameters"].to_numpy_ndarrays()
    np.testing.assert_array_equal(own, table)


@pytest.mark.skipif(not offered(), reason="this system has no anonymous shared files")
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.ray
def test_sums_of_a_simulation_come_in_buffers_that_are_used_again_in_every_round(
    run_tiny, monkeypatch, shared_engine
):
    wide = "model.hidden=[256, 128, 64]"
    serial = run_tiny(wide, "engine.nodes=3", output="serial")
    taken, take_back = [], ReplyBuffer.take_back

    def noted(memory, spots):
        taken.append((memory, {name: len(own) for name, own in spots.items()}))
        return take_back(memory, spots)

    def after_a_collection(pool, content):
        """A buffer for a reply after a garbage collection: replies are in reference cycles, and
        such a small run may not trigger Python's own collections."""
        gc.collect()
        return buffer(pool, content)

    buffer = BufferPool.buffer
    monkeypatch.setattr(BufferPool, "buffer", after_a_collection)
    monkeypatch.setattr(ReplyBuffer, "take_back", noted)
    result = run_tiny(wide, "engine={name='ray', nodes=3}", output="ray")
    whole = {"arrays": len(serial.parameters)}
    sums = [memory for memory, found in taken if found == whole]
    assert len(sums) == 2 * len(serial.rounds) and len(set(map(id, sums))) == 2, (
        "one for each of two actors"
    )
    assert_close(result.parameters, serial.parameters, atol=1e-6)
