# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation on real processes: a simulation's parameters, and no node's sum in the
traffic."""

import contextlib
import sqlite3
import stat

import pandas as pd
import pytest

from tests.runs import assert_close
from tests.simulations.deployment.federation import Federation, until

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]
SECURE = "secure-aggregation=true"


@pytest.fixture(scope="module")
def three(small, tmp_path_factory):
    """A running deployment of three nodes, the first of which sends no sum of its own (see
    `test_device_node.py`)."""
    table = small()
    table["engine"]["nodes"] = 3
    made = Federation(tmp_path_factory.mktemp("secure") / "deployment", table, nodes=3)
    settings = made.deployment.node(1) / "node.toml"
    settings.write_text(settings.read_text() + "least-nodes = 2\n")
    try:
        made.up()
        until(lambda: made.online() >= 3, what="the nodes")
        yield made
    finally:
        made.down()


def test_the_same_parameters_as_in_a_simulation_without(three, tmp_path):
    three.must_run("secure", SECURE)
    simulated, deployed = three.simulated(tmp_path / "simulated"), three.parameters("secure")
    assert len(simulated) > 5
    assert_close(deployed, simulated, rtol=1e-5, atol=1e-6)
    assert three.clients("secure") == [12, 12, 12] and "no sum" not in three.log("secure")
    folders = [three.deployment.node(node) / "state" / "private" for node in (1, 2, 3)]
    files = [file for folder in folders for file in folder.glob("secure-*.sqlite")]
    assert len(files) == 3
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with contextlib.closing(sqlite3.connect(file)) as connection:
            # all unmasked and deleted
            assert connection.execute("SELECT COUNT(*) FROM session").fetchone() == (0,)
            assert connection.execute("SELECT COUNT(*) FROM channel").fetchone() == (1,)


def test_masked_sums_of_rounded_updates_are_those_of_a_simulation_without_masks(three, tmp_path):
    """Two bytes a number: 12 clients of at most 127 steps each."""
    grid = ("compression={name='rounding', bits=8, largest=0.05}",)
    three.must_run("grid", SECURE, *grid)
    simulated, deployed = three.simulated(tmp_path / "simulated", *grid), three.parameters("grid")
    assert_close(deployed, simulated, rtol=1e-5, atol=1e-6)
    assert three.clients("grid") == [12, 12, 12] and "no sum" not in three.log("grid")
    numbers = sum(value.size for value in deployed.values())
    up = pd.read_csv(three.folder("grid") / "rounds.csv")["bytes-up"]
    assert up.tolist() == [12 * (2 * numbers + 6 * 8)] * 3


def test_with_noise_of_the_clients_the_final_evaluation_gives_metrics(three):
    """Each node masks the sum of its clients, who have clipped and noised their updates; at the
    end, all held-out users are evaluated."""
    local = 'privacy={clip-norm=0.5, noise-multiplier=1.0, placement="local"}'
    three.must_run("local", SECURE, local, "sampler={name='full'}", "rounds=2")
    assert three.clients("local") == [18, 18] and "no sum" not in three.log("local")
    users = pd.read_csv(three.folder("local") / "users.csv")
    assert len(users) and users["hits@5"].notna().all()
