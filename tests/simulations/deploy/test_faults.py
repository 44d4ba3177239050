# SPDX-License-Identifier: Apache-2.0
"""Killed processes, silent and lying nodes, full disks: what is kept of a run on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from simulations.deploy.client import ClientPlan, client_processes, prepare
from simulations.deploy.processes import environment_of
from tests.simulations.deploy.federation import free_ports, until

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1200)]
SLOW = ("step.epochs=40", "rounds=4", "engine.timeout=180.0")  # a round of some seconds
PRIVATE = (
    "privacy.clip-norm=1.0",
    "privacy.noise-multiplier=1.0",
    "privacy.delta=1e-3",
    "privacy.adjacency=add-remove",
    "sampler.name=poisson",
    "sampler.cohort=9",
)


@pytest.fixture
def nodes(federation):
    """The deployment with both nodes there; whatever a test did, they are there again after it."""
    until(lambda: federation.online() >= 2, what="both nodes")
    yield federation
    federation.stop_runs()
    until(lambda: federation.online() >= 2, timeout=180, what="both nodes")


def in_a_round(federation, name, after):
    """Wait until a node works on a message of a round after so many."""
    until(lambda: federation.rounds(name) >= after, timeout=180, what=f"round {after}")
    time.sleep(1.0)


def test_a_supernode_killed_in_mid_round_costs_its_part_of_the_round_and_comes_back(nodes):
    run = nodes.start_run("node-killed", *SLOW, "rounds=8")
    in_a_round(nodes, "node-killed", 1)
    nodes.kill("supernode", node=1)
    started = time.monotonic()
    until(lambda: nodes.online() == 1, timeout=60, what="its absence")
    until(lambda: nodes.online() == 2, timeout=120, what="its return")
    print(f"a killed SuperNode was back {time.monotonic() - started:.0f} s later")
    status, output = nodes.finish(run, timeout=600)
    assert status == 0, output
    assert nodes.rounds("node-killed") == 8
    roster = json.loads((nodes.folder("node-killed") / "roster.json").read_text())
    assert len(roster) == 2  # the same node, not a new one


def test_the_clients_process_killed_in_mid_round_fails_the_message_and_no_more(nodes):
    run = nodes.start_run("executor-killed", *SLOW)
    in_a_round(nodes, "executor-killed", 1)
    nodes.kill("executor", node=2)
    status, output = nodes.finish(run, timeout=600)
    assert status == 0, output
    assert nodes.rounds("executor-killed") == 4


def test_the_superlink_killed_in_mid_round_loses_no_round_and_if_it_is_back_soon_nothing(nodes):
    run = nodes.start_run("superlink-killed", *SLOW)
    in_a_round(nodes, "superlink-killed", 1)
    nodes.kill("superlink")
    status, output = nodes.finish(run, timeout=600)
    if status:  # the command that waits may have met the gap; the run has not
        status, output = nodes.resume("superlink-killed", timeout=600)
    assert nodes.rounds("superlink-killed") == 4, output
    if "Node Unavailable" in nodes.log("superlink-killed"):  # on a busy machine it was away for longer than 30 s
        return
    status, output = nodes.run("superlink-lived", *SLOW, timeout=600)
    assert status == 0, output
    for name, value in nodes.parameters("superlink-lived").items():
        np.testing.assert_array_equal(nodes.parameters("superlink-killed")[name], value)


def serverapps(federation):
    """Process ids of the ServerApps that this deployment's executor started."""
    executor = federation.pid("serverapp")
    found = [int(file.parent.name) for file in Path("/proc").glob("[0-9]*/stat") if _group(file) == executor]
    return [pid for pid in found if pid != executor]


def _group(stat_file):
    try:
        return int(stat_file.read_text().rsplit(")", 1)[1].split()[2])
    except OSError:
        return None


def test_the_serverapp_killed_in_mid_round_is_resumed_and_the_ledger_is_not_refunded(nodes):
    name = "serverapp-killed"
    run = nodes.start_run(name, *SLOW, *PRIVATE)
    in_a_round(nodes, name, 2)
    reported = nodes.rounds(name)
    charged = len((nodes.folder(name) / "privacy.jsonl").read_text().splitlines())
    for pid in serverapps(nodes):
        os.kill(pid, signal.SIGKILL)
    status, output = nodes.finish(run, timeout=300)
    assert status != 0 and "fedrec deploy resume" in output
    assert nodes.rounds(name) >= reported
    status, output = nodes.resume(name, timeout=600)
    assert status == 0, output
    assert nodes.rounds(name) == 4
    lines = (nodes.folder(name) / "privacy.jsonl").read_text().splitlines()
    assert len(lines) >= max(4, charged)
    status, output = nodes.run("serverapp-lived", *SLOW, *PRIVATE, timeout=600)
    assert status == 0, output
    assert (nodes.folder(name) / "rounds.csv").read_text().splitlines()[:3] == (
        nodes.folder("serverapp-lived") / "rounds.csv"
    ).read_text().splitlines()[:3]
    for key, value in nodes.parameters("serverapp-lived").items():
        np.testing.assert_array_equal(nodes.parameters(name)[key], value)


def test_a_node_that_never_answers_lets_a_deadline_pass_and_the_denominator_stays(nodes):
    pid = nodes.pid("executor", node=2)
    run = nodes.start_run("silent", *PRIVATE, "rounds=6", "engine.timeout=30.0")
    until(lambda: nodes.rounds("silent") >= 1, timeout=180, what="a round")
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: "let the deadline pass" in nodes.log("silent"), timeout=120, what="a deadline")
        status, output = nodes.finish(run, timeout=300)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert status == 0, output
    assert nodes.rounds("silent") == 6
    lines = [json.loads(line) for line in (nodes.folder("silent") / "privacy.jsonl").read_text().splitlines()]
    assert len(lines) >= 6  # each round is paid for, whoever answered
    status, output = nodes.run("answers-again", "rounds=2")  # the stopped node went on with no stale message
    assert status == 0, output


def enemy(federation, number, claims):
    """Start the node with that number as an enemy; gives its two processes."""
    folder = federation.deployment.node(number)
    (port,) = free_ports(1)
    config = (("partition-id", 7), ("numbers", False))
    door, state = federation.deployment.door, folder / "state"
    plan = ClientPlan(folder, door, folder / "data.csv", state, port=port, config=config)
    prepare(plan)
    supernode, executor = client_processes(plan)
    script = str(Path(__file__).with_name("enemy.py"))
    speaks = "import sys; from simulations.deploy.node import supernode; supernode(sys.argv[1:])"
    commands = (
        (supernode, (sys.executable, "-c", speaks, *supernode.command[1:])),
        (executor, (sys.executable, script, *executor.command[1:])),
    )
    started = []
    for process, command in commands:
        environment = {**environment_of(process), "ENEMY_CLAIMS": ",".join(map(str, claims))}
        with open(folder / f"{process.name}.txt", "wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return started


def test_a_node_that_lies_in_every_way_changes_nothing(nodes):
    """Its clients are drawn like all others, so the comparison is with finite parameters that stay in their range."""
    number = nodes.add_node()
    folder = nodes.deployment.node(number)
    for name in ("data.csv", "catalogue.json"):
        (folder / name).write_bytes((nodes.deployment.node(1) / name).read_bytes())
        (folder / name).chmod(0o600)
    honest = (
        np.load(max((nodes.folder("answers-again") / "checkpoints").glob("*.npz")))
        if nodes.folder("answers-again").exists()
        else None
    )
    processes = enemy(nodes, number, claims=[0, 1, 2, 3])
    try:
        until(lambda: nodes.online() >= 3, what="the enemy")
        status, output = nodes.run(
            "enemy", "rounds=9", "sampler.cohort=18", "engine.nodes=3", "engine.max-failures=0.9", timeout=600
        )
    finally:
        for process in processes:
            process.terminate()
            process.wait(timeout=20)
    log = nodes.log("enemy")
    assert status == 0, output + log
    assert nodes.rounds("enemy") == 9
    assert "clients that it does not own alone" in log  # it claimed 0 to 3, which others named too
    assert log.count("the answer is left out") >= 6 and "per client, usual is" in log
    assert "gave no initial parameters" in log
    values = nodes.parameters("enemy")
    assert all(np.isfinite(value).all() and np.abs(value).max() < 5 for value in values.values())
    assert honest is None or {k for k in honest.files if k.startswith("param")} == set(values)


def test_a_full_disk_is_a_clear_error_and_the_checkpoint_before_it_is_whole(nodes, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(small)], capture_output=True)
    if done.returncode:
        pytest.skip("no right to mount a small disk here")
    try:
        nodes.folder("full").parent.mkdir(exist_ok=True)
        nodes.folder("full").symlink_to(small)
        status, output = nodes.run("full", "rounds=200", "checkpoint.keep=50", timeout=600)
        assert status != 0 and "No space left on device" in output and "what was written before is intact" in output
        done_rounds = len(list((nodes.folder("full") / "checkpoints").glob("round-*.npz")))
        assert done_rounds >= 1
        for file in (nodes.folder("full") / "checkpoints").glob("round-*.npz"):
            with np.load(file) as checkpoint:
                assert all(np.isfinite(checkpoint[key]).all() for key in checkpoint.files if key.startswith("param"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        resumed = nodes.start(
            [sys.executable, "-m", "simulations.cli", "deploy", "resume", str(nodes.path), str(nodes.folder("full"))]
        )
        until(lambda: nodes.rounds("full") > done_rounds, timeout=180, what="a further round")
        nodes.stop_runs()
        nodes.finish(resumed)
    finally:
        nodes.stop_runs()
        time.sleep(2)
        subprocess.run(["umount", "-l", str(small)], check=False)
