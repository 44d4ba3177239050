# SPDX-License-Identifier: Apache-2.0
"""A whole deployment on loopback: TLS, node keys, door, executors; the same numbers as a simulation; late nodes."""

from __future__ import annotations

import json
import os
import stat
import time

import numpy as np
import pytest

from simulations import runner
from tests.simulations.deploy.federation import Federation, until

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]


def test_the_same_file_gives_the_same_parameters_in_simulation_and_deployment(federation, small, tmp_path):
    status, output = federation.run("parity")
    assert status == 0, output
    table = small()
    table["engine"] |= {"name": "serial", "nodes": 2}
    table["evaluation"]["baselines"] = []
    runner.run(table, output=tmp_path / "simulated")
    with np.load(max((tmp_path / "simulated" / "checkpoints").glob("round-*.npz"))) as file:
        simulated = {key: file[key] for key in file.files if key.startswith("param")}
    deployed = federation.parameters("parity")
    assert simulated.keys() == deployed.keys() and len(simulated) > 5
    for name, value in simulated.items():
        np.testing.assert_allclose(deployed[name], value, rtol=1e-5, atol=1e-6)
        assert federation.rounds("parity") == 3


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
    run = federation.start_run("late", "rounds=400", "sampler.cohort=12")
    until(lambda: federation.rounds("late") >= 1, what="the first round")
    before = json.loads((federation.folder("late") / "roster.json").read_text())
    assert len(before) == 2 and sum(len(entry["training"]) for entry in before.values()) == 18
    number = federation.add_node()
    node = federation.deployment.node(number)
    (node / "catalogue.json").write_bytes((federation.deployment.node(1) / "catalogue.json").read_bytes())
    items = json.loads((node / "catalogue.json").read_text())["items"]
    lines = [f"{name},{item},5,{time},train" for name in ("ann", "bob") for time, item in enumerate(items[:9])]
    (tmp_path / "own.csv").write_text("\n".join(["user,item,rating,time,part", *lines]) + "\n")
    client = federation.client(number, "--data", str(tmp_path / "own.csv"))
    until(lambda: "joined with 2 clients" in federation.log("late"), what="the late node")
    joined_after = federation.rounds("late")
    until(lambda: federation.rounds("late") >= joined_after + 8, what="further rounds")
    federation.stop_runs()
    federation.finish(run)
    roster = json.loads((federation.folder("late") / "roster.json").read_text())
    (new,) = [entry for identifier, entry in roster.items() if identifier not in before]
    assert len(new["training"]) == 2 and all(number > 2**32 for number in new["training"])  # opaque, not 0 and 1
    memory = node / "state" / "node.sqlite"
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600
    # Drawn with probability 12 / 20 per round: in eight rounds it is missed by both with probability 0.4^16.
    import sqlite3

    with sqlite3.connect(memory) as connection:
        (times,) = connection.execute("SELECT COUNT(*) FROM spent").fetchone()
        (first,) = connection.execute("SELECT MIN(round) FROM spent").fetchone()
    assert times > 0 and first <= joined_after + 8
    client.terminate()


def test_two_runs_at_once_do_not_meet(federation, small, tmp_path):
    until(lambda: federation.online() >= 2, what="the nodes")
    one, other = federation.start_run("one"), federation.start_run("other", "seed=5")
    for process in (one, other):
        status, output = federation.finish(process)
        assert status == 0, output
    federation.run("one-alone")
    for name, value in federation.parameters("one").items():
        np.testing.assert_array_equal(value, federation.parameters("one-alone")[name])
    assert any(
        (federation.parameters("other")[name] != value).any() for name, value in federation.parameters("one").items()
    )


def test_one_server_and_eight_nodes_start_and_stop(small, tmp_path):
    """The time is printed, not judged: the machine may be busy."""
    table = small()
    table["dataset"]["users"] = 40
    made = Federation(tmp_path / "eight", table, nodes=8)
    started = time.monotonic()
    try:
        made.up()
        print(f"1 server and 8 nodes up after {time.monotonic() - started:.1f} s")
        assert made.online() == 8
        status, output = made.run("eight", "rounds=1")
        assert status == 0, output
    finally:
        made.down()
    from pathlib import Path

    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(made.path).encode() in _read(p)]
    assert not left, [(_read(p), p) for p in left]


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""
