# SPDX-License-Identifier: Apache-2.0
"""The grid of the Ray engine, on a machine and on a cluster."""

import os
import threading
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedrec.data.population import POPULATIONS
from fedrec.errors import ClientError, EngineError
from fedrec.experiment.schema import load
from fedrec.protocol.messages import HELLO, INITIAL, TrainOrder, pack_order, read_arrays
from fedrec.protocol.serialization import to_record
from fedrec.runs.folder import RunFolder
from server.callbacks import Callback
from server.nodes import call_roster
from server.run import execute
from simulations import runner
from simulations.engines import grid as nodes
from simulations.engines import ray as engine
from simulations.engines.ray import open_grid
from simulations.recommending import keep_ids
from tests.runs import assert_close, assert_same_run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

RAY = ("engine.name=ray", "engine.nodes=2")
ENDLESS = {"name": "sgd", "epochs": 10**6}


@pytest.fixture(scope="module")
def run(load_tiny, tmp_path_factory):
    experiment = runner.settle(load_tiny(*RAY))
    return RunFolder.create(experiment, tmp_path_factory.mktemp("ray") / "run")


@pytest.fixture(scope="module")
def grid(run, leftovers):
    mark = f"FEDREC_TEST_MARK={run.path}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*mark.split("=", 1))
        with open_grid(run) as grid:
            yield grid
    assert leftovers(mark) == []


@pytest.fixture
def theta(grid, run):
    (reply,) = grid.send_and_receive([Message(RecordDict(), 2, INITIAL)])
    return read_arrays(reply.content)


def training(theta, node, clients, step=None):
    order = TrainOrder(1, np.array(clients, dtype=np.int64), step=step)
    return Message(pack_order(order, theta), node, "train")


def test_ray_gives_the_serial_engines_numbers(grid, run, run_tiny):
    serial = run_tiny()
    run.user_ids = lambda: keep_ids(run)  # as the runner does
    result = execute(run, grid)
    assert_same_run(result, serial, atol=1e-6)


def test_the_first_node_of_a_machine_is_in_this_process(grid):
    assert list(grid.actors()) == [1]
    replies = grid.send_and_receive([Message(RecordDict(), node, HELLO) for node in (2, 3)])
    assert [reply.metadata.src_node_id for reply in replies] == [2, 3]


def test_a_hanging_node_of_this_process_is_not_waited_for(grid, monkeypatch):
    """Its answer can be fetched later."""
    released = threading.Event()

    def waiting(message):
        released.wait(60)
        return Message(RecordDict(), reply_to=message)

    monkeypatch.setattr(grid._here, "answer", waiting)
    own, other = grid.push_messages([Message(RecordDict(), node, HELLO) for node in (2, 3)])
    (reply,) = grid._collect({other}, 60)
    assert reply.metadata.src_node_id == 3
    assert grid._collect({own}, 0.01) == []
    released.set()
    (late,) = grid._collect({own}, 30)
    assert late.metadata.src_node_id == 2


@pytest.mark.parametrize("large", [True, False])
def test_large_arrays_that_messages_share_are_stored_once(grid, theta, monkeypatch, large):
    """Small ones go with each call."""
    import ray

    stored, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    if large:
        monkeypatch.setattr(engine, "_INLINE", 0)
    arrays = to_record(theta)
    expected = [arrays] if large else []
    messages = [training(arrays, node, []) for node in (2, 3)]
    replies = grid.send_and_receive(messages)
    assert [reply.has_error() for reply in replies] == [False, False] and stored == expected
    assert set(messages[0].content) == {"arrays", "config"}
    stored.clear()
    # as Flower's strategies do
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    grid.send_and_receive([Message(content, node, "evaluate") for node in (2, 3)])
    assert stored == expected


def test_a_failing_client_is_an_error_reply_with_its_own_words(grid, theta):
    bad = to_record({**theta, "layer1.bias": np.zeros(3, np.float32)})
    clients = [call_roster(grid, timeout=60).presences[0].training[0]]
    good, failed = grid.send_and_receive(
        [training(to_record(theta), 3, []), training(bad, 2, clients)], timeout=60
    )
    assert not good.has_error() and failed.has_error() and failed.metadata.src_node_id == 2
    assert failed.error.reason.startswith(
        f"client {clients[0]} failed in step 'Sgd' (round 1, node 0)"
    )
    assert "got: ValueError: Expected parameter 'layer1.bias'" in failed.error.reason


class Fail(Callback):
    def after_round(self, row, seconds):
        raise AssertionError("a round was run")


def test_a_node_that_hangs_is_not_waited_for_and_one_that_dies_answers_with_an_error(
    grid, theta, load_tiny, tmp_path
):
    """The last test: node 3 dies in it."""
    import ray

    client = call_roster(grid, timeout=60).presences[1].training[0]
    endless = training(to_record(theta), 3, [client], ENDLESS)
    replies = grid.send_and_receive([endless, training(to_record(theta), 2, [])], timeout=2)
    assert [reply.metadata.src_node_id for reply in replies] == [2]
    ray.kill(grid.actors()[1])
    (late,) = grid._collect({endless.metadata.message_id}, 30)
    assert late.has_error() and isinstance(late.error, Error) and "Actor" in late.error.reason
    (again,) = grid.send_and_receive([Message(RecordDict(), 3, HELLO)], timeout=30)
    assert again.has_error() and again.metadata.src_node_id == 3
    other = RunFolder.create(runner.settle(load_tiny(*RAY)), tmp_path / "run")
    with pytest.raises(ClientError, match="1 of 2 nodes failed"):
        execute(other, grid, [Fail()])
    assert other.status()["state"] == "failed"


def test_a_missing_cluster_is_reported(load_tiny, tmp_path):
    experiment = runner.settle(load_tiny("engine={name='ray', ray-address='not an address'}"))
    with (
        pytest.raises(EngineError, match="cannot be reached"),
        open_grid(RunFolder.create(experiment, tmp_path / "r")),
    ):
        pass


@pytest.mark.parametrize(
    ("address", "failures", "started"), [(None, 1, True), (None, 2, False), ("there", 1, False)]
)
def test_a_local_ray_that_does_not_start_is_started_once_more(
    monkeypatch, address, failures, started
):
    import ray

    calls = []

    def init(**_):
        calls.append(1)
        if len(calls) <= failures:
            raise RuntimeError("late")

    monkeypatch.setattr(ray, "init", init)
    # so that no other Ray is shut down here
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    if started:
        engine.connect(address, 1, 0)
    else:
        with pytest.raises(EngineError, match="RuntimeError: late"):
            engine.connect(address, 1, 0)
    assert len(calls) == (2 if address is None else 1)


def test_a_plug_in_that_raises_keyboard_interrupt_fails_with_its_line(monkeypatch):
    """Ray takes a KeyboardInterrupt for a cancelled task, whose text is a traceback."""

    def interrupting(message):
        raise KeyboardInterrupt

    monkeypatch.setattr(nodes, "Message", lambda error, reply_to: error)  # outside of a run
    error = nodes.answer_or_error(None, interrupting)
    assert error.reason.startswith("KeyboardInterrupt (")
    assert "test_ray_grid.py, line" in error.reason


# A Ray cluster of three raylets with object stores of their own, of which one is killed.

NODES = 4
SLOW = {"name": "sgd", "epochs": 150, "batch-size": 8}
"""Makes a round longer than the time to kill a raylet."""
EACH: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
SOON = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""A killed raylet is declared dead after two seconds instead of Ray's 15."""


@pytest.fixture(scope="module")
def started():
    """Head and two further raylets, each with two cores: four nodes do not fit on one."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_AUTH")]:
            patch.delenv(name)
        head = {**EACH, "include_dashboard": False, "_system_config": SOON}
        made = Cluster(initialize_head=True, head_node_args=head)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def cluster(started):
    """Three raylets, also after an earlier test killed one."""
    import ray

    while len(started.worker_nodes) < 2:
        started.add_node(**EACH)
    started.wait_for_nodes(60)
    yield started
    ray.shutdown()


def on(cluster, table):
    """Overrides that run an experiment on the cluster."""
    table["engine"] |= {"name": "ray", "nodes": NODES, "ray-address": cluster.address}


def raylets_with_nodes():
    """Identifiers of the raylets on which actors live."""
    from ray._private.state import actors

    return {a["Address"]["NodeID"] for a in actors().values() if a["State"] == "ALIVE"}


class Killer(Callback):
    """Kills a raylet that is not the head and has nodes, some seconds after the first round has
    ended: in the second one, or before it."""

    def __init__(self, cluster, wait=0.3):
        self.cluster, self.wait, self.used, self.timer = cluster, wait, set(), None

    def after_round(self, row, seconds):
        if self.used:
            return
        self.used = raylets_with_nodes()
        victim = next(node for node in self.cluster.worker_nodes if node.node_id in self.used)
        self.timer = threading.Timer(self.wait, kill, [self.cluster, victim])
        self.timer.start()
        if not self.wait:
            self.timer.join()

    def killed(self):
        """Whether a raylet was killed; waits until its processes have ended."""
        if self.timer is not None:
            self.timer.join(60)
        return self.timer is not None and not self.timer.is_alive()


def kill(cluster, raylet):
    cluster.remove_node(raylet, allow_graceful=False)


def serial_run(table, folder):
    table["engine"] |= {"name": "serial", "nodes": NODES}
    table["engine"].pop("ray-address", None)
    return runner.run(table, output=folder)


def same(result, serial):
    assert_close(result.parameters, serial.parameters, atol=1e-6)


@pytest.fixture
def table(tiny_experiment):
    """Overrides of an experiment in which all four nodes have clients in each round."""
    table = tiny_experiment() | {"rounds": 4}
    table["sampler"]["cohort"] = 12
    table["engine"]["path"] = "reference"
    return table


@pytest.mark.cluster
def test_three_raylets_give_the_numbers_of_one_process(cluster, table, tmp_path):
    on(cluster, table)
    seen = set()

    class Look(Callback):
        def after_round(self, row, seconds):
            seen.update(raylets_with_nodes())

    result = runner.run(table, output=tmp_path / "cluster", callbacks=[Look()])
    assert len(seen) >= 2
    # its arrays were in the cluster's object store, in memory that other objects use now
    assert POPULATIONS.cached(load(table)) is None
    serial = serial_run(table, tmp_path / "serial")
    assert POPULATIONS.cached(load(table)) is not None
    assert_same_run(result, serial, atol=1e-6)


@pytest.mark.cluster
def test_a_run_continues_without_the_nodes_of_a_killed_raylet(cluster, table, tmp_path):
    on(cluster, table)
    table["step"] = SLOW
    table["engine"]["max-failures"] = 0.75
    killer = Killer(cluster)
    runner.run(table, output=tmp_path / "run", callbacks=[killer])
    assert killer.killed()
    rows = (tmp_path / "run" / "rounds.csv").read_text().splitlines()
    place = rows[0].split(",").index("num-clients")
    clients = [int(float(row.split(",")[place])) for row in rows[1:]]
    assert len(clients) == 4 and clients[0] == 12 and 0 < clients[-1] < 12


@pytest.mark.cluster
def test_actors_on_a_raylet_that_was_killed_before_they_ran_run_on_another(
    cluster, tiny_experiment, tmp_path, monkeypatch
):
    """Six actors need all three raylets, of which one is dead but not yet detected by Ray."""
    table = tiny_experiment()
    on(cluster, table)
    table["engine"] |= {"nodes": 6, "max-failures": 0.0}
    started = []

    class Watched(engine.RayGrid):
        def __init__(self, nodes, start, *more, **named):
            super().__init__(
                nodes, lambda index: started.append(index) or start(index), *more, **named
            )
            cluster.add_node(**EACH, wait=False)  # which joins before the other is declared dead

    monkeypatch.setattr(engine, "RayGrid", Watched)
    kill(cluster, next(iter(cluster.worker_nodes)))
    result = runner.run(table, output=tmp_path / "run")
    assert len(started) > 6
    same(result, serial_run(table, tmp_path / "serial"))
