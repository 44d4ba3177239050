# SPDX-License-Identifier: Apache-2.0
"""Keys of nodes on real processes: one that two machines have, one that is revoked, and one that
takes its place."""

import shutil
import sys

import pytest

from simulations.deployment import operator
from simulations.deployment.renewal import revoke
from tests.simulations.deployment.federation import (
    Federation,
    allow_any_number_of_runs,
    free_ports,
    until,
)

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def nodes(small, tmp_path_factory):
    """A deployment of two nodes of its own, of which one is revoked."""
    made = Federation(tmp_path_factory.mktemp("keys") / "d", small())
    try:
        yield made.up()
    finally:
        made.down()


def copied(folder, target):
    """The folder of a node on another machine: its key and data, without its state."""
    return shutil.copytree(folder, target, ignore=shutil.ignore_patterns("state"))


def client(nodes, folder):
    """`fedrec client` with a folder; its process and the log of its SuperNode."""
    command = [*["-m", "simulations.cli", "client", "--join"], str(folder), "--superlink"]
    process = nodes.start(
        [sys.executable, *command, nodes.deployment.gateway, "--port", str(free_ports(1)[0])]
    )
    return process, folder / "state" / "logs" / "supernode.txt"


def test_one_key_on_two_machines_is_one_node(nodes, tmp_path):
    """The second is refused as long as the first is online, and the run is as without it."""
    before = nodes.online()
    process, log = client(nodes, copied(nodes.deployment.node(2), tmp_path / "copy"))
    try:
        until(lambda: log.exists() and "rror" in log.read_text(), what="the refusal")
        assert "SuperNode ID" not in log.read_text() and nodes.online() == before == 2
        nodes.must_run("one-key-twice", "rounds=1")
        assert nodes.clients("one-key-twice") == [12] and len(nodes.roster("one-key-twice")) == 2
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_a_revoked_key_takes_no_part_and_another_takes_its_place(nodes, tmp_path):
    stolen = copied(nodes.deployment.node(2), tmp_path / "stolen")
    nodes.must_run("before", "rounds=1")
    whole = nodes.roster("before")
    nodes.deployment = revoke(nodes.deployment, "node-2")
    operator.register_nodes(nodes.deployment)
    # the node that was online with it, and a thief who has its key
    until(lambda: nodes.online() == 1, what="the end of the revoked node")
    process, log = client(nodes, stolen)
    gateway = nodes.deployment.logs / "gateway.txt"
    until(lambda: log.is_file() and "rror" in log.read_text(), what="the refusal")
    until(
        lambda: gateway.is_file() and "with an unknown key" in gateway.read_text(),
        what="the gateway's word of it",
    )
    process.terminate()
    process.wait(timeout=60)
    assert "SuperNode ID" not in log.read_text() and nodes.online() == 1
    nodes.must_run("without", "rounds=1", "sampler.cohort=6", "engine.nodes=1")
    assert len(nodes.roster("without")) == 1
    # its owner gets a folder with another key, and the data go into it
    number = nodes.add_node()
    assert number == 3
    for name in ("data.csv", "node.toml"):
        shutil.copy(nodes.deployment.node(2) / name, nodes.deployment.node(3) / name)
    allow_any_number_of_runs(nodes.deployment)
    rotated, log = client(nodes, copied(nodes.deployment.node(3), tmp_path / "rotated"))
    until(lambda: nodes.online() == 2, what="the node with the new key")
    nodes.must_run("rotated", "rounds=1")
    found = nodes.roster("rotated")
    assert sorted(map(len, found.values())) == sorted(map(len, whole.values()))
    assert nodes.clients("rotated") == [12] and found.keys() & whole.keys() != whole.keys()
    assert rotated.poll() is None
