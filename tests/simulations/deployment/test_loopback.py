# SPDX-License-Identifier: Apache-2.0
"""A whole deployment on loopback: TLS, node keys, gateway, executors; the same numbers as a
simulation; late nodes."""

import contextlib
import json
import os
import sqlite3
import stat
import time
from pathlib import Path

import pandas as pd
import pytest

from tests.runs import assert_close
from tests.simulations.deployment.federation import Federation, until

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def parity(federation):
    """A run to its end, by the command; its name."""
    until(lambda: federation.online() >= 2, what="the nodes")
    command = (
        "run",
        federation.path,
        federation.experiment_file,
        "-o",
        federation.folder("parity"),
    )
    status, output = federation.finish(federation.command(*command))
    assert status == 0, output
    assert "hits@5" in output and str(federation.folder("parity")) in output
    return "parity"


def test_the_same_file_gives_the_same_parameters_in_simulation_and_deployment(
    federation, parity, tmp_path
):
    simulated = federation.simulated(tmp_path / "simulated")
    deployed = federation.parameters(parity)
    assert len(simulated) > 5
    assert_close(deployed, simulated, rtol=1e-5, atol=1e-6)
    assert federation.rounds(parity) == 3


def test_a_robust_rule_over_the_clients_of_nodes_that_host_many(federation, tmp_path):
    """Each node hosts ten clients or so."""
    name = "trimmed-mean"
    rule = (f"strategy={{name='{name}', cut=0.2}}", "rounds=2", "sampler.cohort=18")
    until(lambda: federation.online() >= 2, what="the nodes")
    federation.must_run("trimmed", *rule)
    simulated = federation.simulated(tmp_path / "simulated", *rule)
    assert_close(federation.parameters("trimmed"), simulated, rtol=1e-5, atol=1e-6)
    assert federation.clients("trimmed") == [18, 18]


def test_compressed_updates_are_those_of_a_simulation(federation, tmp_path):
    """With what clients keep of their updates: a client takes part in two rounds of three."""
    top = ("compression={name='top-k', share=0.1, bits=4}",)
    until(lambda: federation.online() >= 2, what="the nodes")
    federation.must_run("compressed", *top)
    simulated = federation.simulated(tmp_path / "simulated", *top)
    assert_close(federation.parameters("compressed"), simulated, rtol=1e-5, atol=1e-6)
    found, expected = (
        pd.read_csv(folder / "rounds.csv")["bytes-up"].tolist()
        for folder in (federation.folder("compressed"), tmp_path / "simulated")
    )
    assert found == expected and min(found) > 0


def test_files_that_hold_secrets_are_the_owners_alone(federation):
    secret = (".key", ".secret", "data.csv", ".sqlite", "config.toml", "processes.json")
    seen = 0
    for file in federation.path.rglob("*"):
        if file.is_file() and file.name.endswith(secret):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
            seen += 1
    assert seen > 10
    assert stat.S_IMODE(os.stat(federation.path).st_mode) == 0o700


def test_a_node_that_comes_late_is_used_from_the_next_round_on(federation, tmp_path):
    until(lambda: federation.online() >= 2, what="the nodes")
    run = federation.start_run("newcomer", "rounds=400", "sampler.cohort=18", "engine.nodes=2")
    until(lambda: federation.rounds("newcomer") >= 1, what="the first round")
    before = federation.roster("newcomer")
    number = federation.add_node()
    node = federation.deployment.node(number)
    items = json.loads((node / "catalogue.json").read_text())["items"]
    lines = [
        f"{name},{item},5,{time},train"
        for name in ("ann", "bob")
        for time, item in enumerate(items[:9])
    ]
    (tmp_path / "own.csv").write_text("\n".join(["user,item,rating,time,part", *lines]) + "\n")
    client = federation.client(number, "--data", str(tmp_path / "own.csv"))
    until(lambda: "joined with 2 clients" in federation.log("newcomer"), what="the late node")
    joined_after = federation.rounds("newcomer")
    until(lambda: federation.rounds("newcomer") >= joined_after + 4, what="further rounds")
    federation.stop_runs()
    federation.wait_for(run)
    client.terminate()
    client.wait(timeout=60)
    roster = federation.roster("newcomer")
    (new,) = [clients for node_id, clients in roster.items() if node_id not in before]
    # opaque, not 0 and 1
    assert len(new) == 2 and all(number > 2**32 for number in new)
    memory = node / "state" / "node.sqlite"
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600
    # 18 of 20 are drawn: in four rounds both are missed with probability (1 / 190)^4.
    with contextlib.closing(sqlite3.connect(memory)) as connection:
        times, first = connection.execute("SELECT COUNT(*), MIN(round) FROM spent").fetchone()
    assert times > 0 and first <= joined_after + 4


def test_two_runs_at_once_do_not_meet(federation, parity):
    until(lambda: federation.online() >= 2, what="the nodes")
    runs = [
        federation.start_run("one", "engine.timeout=300.0"),
        federation.start_run("other", "seed=5"),
    ]
    for run in runs:
        federation.must_finish(run)
    alone, one, other = (federation.parameters(name) for name in (parity, "one", "other"))
    assert_close(one, alone)
    assert any((other[name] != value).any() for name, value in alone.items())


def test_one_server_and_eight_nodes_start_and_stop(small, tmp_path):
    """The time is printed, not tested, because the machine may be busy."""
    table = small()
    table["dataset"]["users"] = 40
    made = Federation(tmp_path / "eight", table, nodes=8)
    started = time.monotonic()
    try:
        made.up()
        print(f"1 server and 8 nodes up after {time.monotonic() - started:.1f} s")
        assert made.online() == 8
        made.kill("gateway")
        until(lambda: made.answers("gateway"), what="the gateway")
        made.must_run("eight", "rounds=1")
    finally:
        made.down()
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(made.path).encode() in _read(p)]
    assert not left, [(_read(p), p) for p in left]


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""
