# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of three raylets with object stores of their own, of which one is killed."""

import os
import threading
from typing import Any

import pytest

from fedrec.data.cache import POPULATIONS
from fedrec.errors import FedrecError
from fedrec.experiment.loading import load
from server.callbacks.base import Callback
from simulations import runner
from simulations.engines import ray as engine
from simulations.engines.placement import Placement
from tests.runs import assert_close, assert_same_run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
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


def test_a_run_that_broke_off_with_a_raylet_is_resumed_on_the_others(cluster, table, tmp_path):
    on(cluster, table)
    killer = Killer(cluster, wait=0.0)
    with pytest.raises(FedrecError, match="nodes failed"):
        runner.run(table, output=tmp_path / "run", callbacks=[killer])
    assert killer.killed()
    result = runner.resume(tmp_path / "run")
    same(result, serial_run(table, tmp_path / "serial"))


def test_actors_on_a_raylet_that_was_killed_before_they_ran_run_on_another(
    cluster, tiny_experiment, tmp_path, monkeypatch
):
    """Six actors need all three raylets, of which one is dead but not yet detected by Ray."""
    table = tiny_experiment()
    on(cluster, table)
    table["engine"] |= {"nodes": 6, "max-failures": 0.0}
    started = []

    class Watched(Placement):
        def __init__(self, start, nodes):
            super().__init__(lambda place: started.append(place) or start(place), nodes)
            cluster.add_node(**EACH, wait=False)  # which joins before the other is declared dead

    monkeypatch.setattr(engine, "Placement", Watched)
    kill(cluster, next(iter(cluster.worker_nodes)))
    result = runner.run(table, output=tmp_path / "run")
    assert len(started) > 6
    same(result, serial_run(table, tmp_path / "serial"))
