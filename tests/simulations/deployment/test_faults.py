# SPDX-License-Identifier: Apache-2.0
"""Deployments under faults and attacks, and with replaced keys."""

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import pytest

from simulations.deployment import operator
from simulations.deployment.client import ClientPlan, client_processes, prepare
from simulations.deployment.layout import Authority, NodeKey, new_secret, revoke, write_private
from simulations.deployment.processes import environment_of
from simulations.engines.flower import _app_folder
from simulations.flower_commands import script
from tests.runs import assert_close
from tests.simulations.deployment.federation import (
    Federation,
    allow_any_number_of_runs,
    free_ports,
    until,
)

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1200)]

# Killed processes, silent and malicious nodes, full disks: what is preserved of a run on real
# processes.

# a second of work
SLOW = ("step.epochs=20", "rounds=4", "engine.timeout=180.0", "engine.max-failures=1.0")
PRIVATE = (
    "privacy.clip-norm=1.0",
    "privacy.noise-multiplier=1.0",
    "privacy.delta=1e-3",
    "sampler.cohort=9",
)


@pytest.fixture
def nodes(federation):
    """The deployment with both nodes online; after each test they are online again."""
    until(lambda: federation.online() >= 2, what="both nodes")
    yield federation
    federation.stop_runs()
    until(lambda: federation.online() >= 2, what="both nodes")


def at_work(federation, name, node):
    """Wait until a node works on a message of a round after the first; returns the process that
    does."""
    until(lambda: federation.rounds(name) >= 1, what="a round")
    before = set(federation.children("executor", node))  # possibly of the round before
    until(lambda: set(federation.children("executor", node)) - before, what="a message", pause=0.02)
    return set(federation.children("executor", node)) - before


def test_a_supernode_killed_in_mid_round_costs_its_part_of_the_round_and_comes_back(nodes):
    said = nodes.deployment.logs / "nodes" / "node-1" / "supernode.txt"
    before = said.read_text().count("SuperNode ID")
    # The message of the killed process is abandoned when it expires.
    run = nodes.start_run("node-killed", *SLOW, "engine.timeout=60.0")
    at_work(nodes, "node-killed", 1)
    nodes.kill("supernode", node=1)
    started = time.monotonic()
    until(lambda: said.read_text().count("SuperNode ID") > before, what="its return")
    print(f"a killed SuperNode was back {time.monotonic() - started:.0f} s later")
    nodes.must_finish(run)
    clients = nodes.clients("node-killed")
    assert len(clients) == 4 and clients[0] == 12 and min(clients) < 12
    roster = nodes.roster("node-killed")
    until(lambda: nodes.online() == 2, what="both nodes")
    nodes.must_run("node-back", "rounds=1")
    # the same node, not a new one
    assert nodes.roster("node-back") == roster
    assert nodes.clients("node-back") == [12]


@pytest.mark.parametrize("killed", ["executor", "fork"])
def test_the_clients_process_killed_in_mid_round_fails_the_message_and_no_more(nodes, killed):
    """The executor, or its fork that works on the message, as by the system when memory is
    short."""
    name = f"{killed}-killed"
    run = nodes.start_run(name, *SLOW)
    forks = at_work(nodes, name, 2)
    for pid in forks if killed == "fork" else [nodes.pid("executor", node=2)]:
        os.kill(pid, signal.SIGKILL)
    # the server was notified at once
    assert "did not reply before" not in nodes.must_finish(run)
    assert min(nodes.clients(name)) < 12 and nodes.clients(name)[-1] == 12


def test_the_superlink_killed_in_mid_round_loses_no_round_and_if_it_is_back_soon_nothing(
    nodes, tmp_path
):
    run = nodes.start_run("superlink-killed", *SLOW)
    at_work(nodes, "superlink-killed", 1)
    nodes.kill("superlink")
    why = nodes.must_finish(run)
    assert nodes.rounds("superlink-killed") == 4
    # on a busy machine it was offline for longer than 30 s
    if nodes.clients("superlink-killed") != [12] * 4:
        print("the SuperLink was away for too long", why)
        return
    simulated = nodes.simulated(tmp_path / "simulated", *SLOW)
    assert_close(nodes.parameters("superlink-killed"), simulated, rtol=1e-5, atol=1e-6)


def test_the_gateway_killed_in_mid_round_loses_no_round(nodes):
    run = nodes.start_run("gateway-killed", *SLOW)
    at_work(nodes, "gateway-killed", 1)
    nodes.kill("gateway")
    nodes.must_finish(run)
    assert nodes.rounds("gateway-killed") == 4


def test_the_serverapp_killed_in_mid_round_is_resumed_and_the_ledger_is_not_refunded(
    nodes, tmp_path
):
    name = "serverapp-killed"
    run = nodes.start_run(name, *SLOW, *PRIVATE)
    at_work(nodes, name, 1)
    reported, charged = nodes.rounds(name), nodes.charges(name)
    for pid in nodes.children("serverapp"):
        os.kill(pid, signal.SIGKILL)
    finished, why = nodes.wait_for(run)
    assert not finished and "fedrec deploy resume" in why
    assert 1 <= reported <= nodes.rounds(name) < 4
    status, output = nodes.finish(nodes.command("resume", nodes.path, nodes.folder(name)))
    assert status == 0, output
    assert nodes.rounds(name) == 4
    assert len(nodes.charges(name)) >= 4 and nodes.charges(name)[: len(charged)] == charged
    simulated = nodes.simulated(tmp_path / "simulated", *SLOW, *PRIVATE)
    assert_close(nodes.parameters(name), simulated, rtol=1e-5, atol=1e-6)


def test_the_error_of_a_nodes_work_is_in_its_own_log_and_not_told_to_the_server(nodes):
    data = nodes.deployment.node(2) / "data.csv"
    honest = data.read_text()
    data.write_text(honest.replace("\n", '\n"', 1))
    try:
        finished, why = nodes.run("broken-table", "rounds=1", "engine.timeout=40.0")
    finally:
        data.write_text(honest)
    log = (nodes.deployment.logs / "nodes" / "node-2" / "executor.txt").read_text()
    assert "data.csv cannot be read" in log.partition("a message failed")[2], log[-2000:]
    assert not finished and "node-2" in why and "data.csv" not in why
    finished, why = nodes.run("mended-table", "rounds=1")
    assert finished and nodes.clients("mended-table") == [12], why


def test_a_node_that_never_answers_lets_a_deadline_pass_and_the_denominator_stays(nodes):
    pid = nodes.pid("executor", node=2)
    given = ("rounds=4", "engine.timeout=20.0", "engine.max-failures=1.0")
    run = nodes.start_run("silent", *PRIVATE, *given)
    until(lambda: nodes.rounds("silent") >= 1, what="a round")
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: "missed the deadline" in nodes.log("silent"), what="a deadline")
        finished, why = nodes.wait_for(run)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert finished, why
    assert nodes.rounds("silent") == 4
    charges = [json.loads(line) for line in nodes.charges("silent")]
    # each is charged, with the same cost, whichever nodes answered
    assert [charge["round"] for charge in charges] == [1, 2, 3, 4]
    assert all(charge["event"] == charges[0]["event"] for charge in charges)
    # the stopped node did not continue with a stale message
    nodes.must_run("answers-again", "rounds=1")
    assert nodes.clients("answers-again") == [12]


def test_a_late_node_is_left_out_and_every_round_closes_by_its_deadline(nodes):
    """It is no failure, none of which is tolerated here."""
    given = ("rounds=5", "engine.timeout=40.0", "engine.max-failures=0.0", "closing={deadline=8.0}")
    run = nodes.start_run("late", *given)
    until(lambda: nodes.rounds("late") >= 1, what="a round")
    pid = nodes.pid("executor", node=2)
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: "missed the deadline" in nodes.log("late"), what="a deadline")
    finally:
        os.kill(pid, signal.SIGCONT)
    nodes.must_finish(run)
    rounds = pd.read_csv(nodes.folder("late") / "rounds.csv")
    late = rounds["num-clients"] < 12
    assert len(rounds) == 5 and late.any() and not late[0]
    assert (rounds["dropped-replies"] > 0).equals(late)
    assert rounds["dropped-or-bounded"][late].str.contains("no reply before the deadline").all()
    timings = pd.read_csv(nodes.folder("late") / "timings.csv")
    assert timings["train"].max() < 12  # the deadline, and two polls


def malicious(federation, number, claims):
    """Start the node with that number as a malicious node; gives its two processes."""
    folder = federation.deployment.node(number)
    (port,) = free_ports(1)
    plan = ClientPlan(folder, federation.deployment.gateway, port=port, settings=["numbers=false"])
    prepare(plan)
    supernode, executor = client_processes(plan)
    script = str(Path(__file__).with_name("malicious_node.py"))
    speaks = (
        "import sys; from simulations.deployment import supernode as n; n.supernode(sys.argv[1:])"
    )
    commands = (
        (supernode, (sys.executable, "-c", speaks, *supernode.command[1:])),
        (executor, (sys.executable, script, *executor.command[1:])),
    )
    started = []
    for process, command in commands:
        environment = {**environment_of(process), "MALICIOUS_CLAIMS": ",".join(map(str, claims))}
        with open(folder / f"{process.name}.txt", "wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return started


def test_false_replies_of_every_kind_change_nothing(nodes):
    """Its clients are sampled like all others, so the parameters are only checked to be finite and
    of usual size."""
    number = nodes.add_node()
    folder = nodes.deployment.node(number)
    for name in ("data.csv", "catalogue.json"):
        (folder / name).write_bytes((nodes.deployment.node(1) / name).read_bytes())
        (folder / name).chmod(0o600)
    processes = malicious(nodes, number, claims=[0, 1, 2, 3])
    try:
        until(lambda: nodes.online() >= 3, what="the malicious node")
        finished, why = nodes.run(
            "malicious",
            "rounds=9",
            "sampler.cohort=18",
            "engine.nodes=3",
            "engine.max-failures=0.9",
            timeout=600,
        )
    finally:
        for process in processes:
            process.terminate()
            process.wait(timeout=60)
    assert finished, why
    assert nodes.rounds("malicious") == 9
    # it claimed 0 to 3, which other nodes announced too
    assert "clients of other nodes" in why
    assert why.count("the reply is dropped") >= 6 and "times the usual" in why
    rounds = pd.read_csv(nodes.folder("malicious") / "rounds.csv")
    assert (rounds["dropped-replies"].iloc[[0, 1, 2, 4, 5, 6, 7, 8]] == 1).all()
    assert rounds["bounded-replies"].tolist()[3] == 1
    result = json.loads((nodes.folder("malicious") / "result.json").read_text())
    assert result["replies"]["dropped"] >= 8 and "dropped or missing" in str(result["replies"])
    assert "returned no valid initial parameters" in why
    values = nodes.parameters("malicious")
    assert all(np.isfinite(value).all() and np.abs(value).max() < 5 for value in values.values())


def test_a_full_disk_is_a_clear_error_and_the_checkpoint_before_it_is_whole(nodes, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(small)], capture_output=True
    )
    if done.returncode:
        pytest.skip("no right to mount a small disk here")
    try:
        nodes.folder("full").parent.mkdir(exist_ok=True)
        nodes.folder("full").symlink_to(small)
        finished, why = nodes.run("full", "rounds=200", "checkpoint.keep=50", timeout=600)
        assert not finished
        assert "No space left on device" in why
        assert "earlier files are intact" in why
        whole = sorted((nodes.folder("full") / "checkpoints").glob("round-*.npz"))
        assert whole
        for file in whole:
            with np.load(file) as checkpoint:
                assert all(
                    np.isfinite(checkpoint[key]).all()
                    for key in checkpoint.files
                    if key.startswith("param")
                )
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        before = nodes.rounds("full")
        run = nodes.start_again("full")
        until(lambda: nodes.rounds("full") > max(before, len(whole)), what="a further round")
        nodes.stop_runs()
        nodes.wait_for(run)
    finally:
        nodes.stop_runs()
        time.sleep(2)
        subprocess.run(["umount", "-l", str(small)], check=False)


# With only the authority's certificate, or with an unregistered key: refused and logged.


@pytest.fixture
def attacker(federation, tmp_path):
    """A folder with the authority's certificate and a Flower home that points at an address."""

    def at(address):
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        shutil.copy(federation.deployment.authority, tmp_path / "ca.crt")
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "x"\n\n[superlink.x]\naddress = "{address}"\n'
            f'root-certificates = "{tmp_path / "ca.crt"}"\n'
        )
        return {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    return at


def flwr(arguments, environment):
    """A command of Flower's, in the environment of the attacker."""
    command = [script("flwr"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_no_node_can_be_registered_through_the_gateway(federation, attacker, tmp_path):
    with federation.control() as control:
        before = len(control.nodes())
    (tmp_path / "mine.pub").write_bytes(NodeKey.create().public)
    command = ["supernode", "register", str(tmp_path / "mine.pub"), "x"]
    done = flwr(command, attacker(federation.deployment.gateway))
    assert done.returncode != 0 and "registered successfully" not in done.stdout
    with federation.control() as control:
        assert len(control.nodes()) == before
    told = (federation.deployment.logs / "gateway.txt").read_text()
    assert "refused POST b'/v1/control/register-node'" in told
    # The same command works at the inner port: the gateway refuses it, and not an error in this
    # test.
    done = flwr(command, attacker(federation.deployment.superlink))
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_run_can_be_started_through_the_gateway(federation, attacker, tmp_path):
    with federation.control() as control:
        before = len(control.runs())
    app = _app_folder(tmp_path / "fedrec")
    done = flwr(["run", str(app), "x"], attacker(federation.deployment.gateway))
    assert done.returncode != 0
    with federation.control() as control:
        assert len(control.runs()) == before
    told = (federation.deployment.logs / "gateway.txt").read_text()
    assert "refused POST b'/v1/control/start-run'" in told


def test_no_other_executor_gets_the_serverapps_task(federation, tmp_path, attacker):
    """Refused at the gateway, and at the inner port without the secret; all four try at the same
    time."""
    until(lambda: federation.online() >= 2, what="the nodes")
    # the real executor sleeps: the task is waiting
    os.kill(federation.pid("serverapp"), signal.SIGSTOP)
    impostors = []
    try:
        run = federation.start_run("impostors", "rounds=1")
        for where in ("gateway", "superlink"):
            for secret in (False, True):
                folder = tmp_path / f"{where}-{secret}"
                folder.mkdir()
                impostors.append(
                    impostor(getattr(federation.deployment, where), secret, folder, attacker)
                )
        tried = [folder / "log.txt" for folder in tmp_path.glob("*-*")]
        until(
            lambda: all("Starting Flower SuperExec" in file.read_text() for file in tried),
            what="all impostors",
        )
        time.sleep(10)  # they poll a hundred times a second
        assert not list(tmp_path.glob("*/got-it")), [file.read_text() for file in tried]
        assert _pending(federation)
    finally:
        for process in impostors:
            process.kill()
            process.wait()
        os.kill(federation.pid("serverapp"), signal.SIGCONT)
    finished, why = federation.wait_for(run)  # so the task was available
    assert finished, why


def impostor(address, secret, folder, attacker):
    """Flower's own executor at an address; if it got the task, it would start another program than
    Flower's."""
    environment = {**attacker(address), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.01"}
    command = [script("flower-superexec"), "--root-certificates", str(folder.parent / "ca.crt")]
    command += ["--runtime-api-address", address]
    if secret:
        command += [
            "--superexec-auth-secret-file",
            str(write_private(folder / "secret", new_secret())),
        ]
    (folder / "flwr-serverapp").write_text(f"#!/bin/sh\ntouch {folder}/got-it\n")
    (folder / "flwr-serverapp").chmod(0o755)
    environment["PATH"] = f"{folder}:{environment['PATH']}"
    with open(folder / "log.txt", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _pending(federation):
    with federation.control() as control:
        return any(run.status.startswith("pending") for run in control.runs())


def test_a_node_with_an_unknown_key_is_refused_and_logged(federation, tmp_path):
    node = federation.copied(1, tmp_path / "unknown")
    write_private(node / "node.key", NodeKey.create().private)
    before = federation.online()
    client, log = federation.client(node)
    gateway = federation.deployment.logs / "gateway.txt"
    until(lambda: "with an unknown key" in gateway.read_text(), what="the refusal")
    client.terminate()
    assert federation.online() == before
    assert "SuperNode ID" not in log.read_text()


def test_calls_without_a_signature_or_with_anothers_are_refused(federation):
    context = ssl.create_default_context(cafile=str(federation.deployment.authority))
    with httpx.Client(
        base_url=f"https://{federation.deployment.gateway}", verify=context
    ) as client:
        for headers in ({}, {"x-flwr-public-key": "AAAA", "x-flwr-signature": "AAAA"}):
            headers = {**headers, "content-type": "application/protobuf"}
            for path in (
                "pull-messages",
                "push-messages",
                "activate-node",
                "register-node",
                "get-fab",
            ):
                answer = client.post(f"/v1/fleet/{path}", content=b"", headers=headers)
                assert 400 <= answer.status_code < 500, (path, answer.status_code, answer.text)


def test_no_tls_is_refused(federation):
    for target in (
        federation.deployment.settings.port,
        federation.deployment.settings.superlink_port,
    ):
        with socket.create_connection(("127.0.0.1", target), timeout=10) as bare:
            bare.sendall(
                b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
            )
            bare.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert not bare.recv(100).startswith(b"HTTP/1.1 2")


def test_a_server_with_a_wrong_certificate_is_refused_by_the_client(federation, tmp_path):
    node = federation.copied(1, tmp_path / "careful")
    (node / "ca.crt").write_bytes(Authority.create("another").issued.certificate)
    client, log = federation.client(node)
    until(lambda: "CERTIFICATE_VERIFY_FAILED" in log.read_text(), what="the refusal")
    client.terminate()
    assert "SuperNode ID" not in log.read_text()


# Keys of nodes on real processes: one that two machines have, one that is revoked, and one that
# takes its place.


@pytest.fixture(scope="module")
def nodes_of_keys(small, tmp_path_factory):
    """A deployment of two nodes of its own, of which one is revoked."""
    made = Federation(tmp_path_factory.mktemp("keys") / "d", small())
    try:
        yield made.up()
    finally:
        made.down()


def test_one_key_on_two_machines_is_one_node(nodes_of_keys, tmp_path):
    """The second is refused as long as the first is online, and the run is as without it."""
    before = nodes_of_keys.online()
    process, log = nodes_of_keys.client(nodes_of_keys.copied(2, tmp_path / "copy"))
    try:
        until(lambda: log.exists() and "rror" in log.read_text(), what="the refusal")
        assert "SuperNode ID" not in log.read_text() and nodes_of_keys.online() == before == 2
        nodes_of_keys.must_run("one-key-twice", "rounds=1")
        assert (
            nodes_of_keys.clients("one-key-twice") == [12]
            and len(nodes_of_keys.roster("one-key-twice")) == 2
        )
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_a_revoked_key_takes_no_part_and_another_takes_its_place(nodes_of_keys, tmp_path):
    stolen = nodes_of_keys.copied(2, tmp_path / "stolen")
    nodes_of_keys.must_run("before", "rounds=1")
    whole = nodes_of_keys.roster("before")
    nodes_of_keys.deployment = revoke(nodes_of_keys.deployment, "node-2")
    operator.register_nodes(nodes_of_keys.deployment)
    # the node that was online with it, and a thief who has its key
    until(lambda: nodes_of_keys.online() == 1, what="the end of the revoked node")
    process, log = nodes_of_keys.client(stolen)
    gateway = nodes_of_keys.deployment.logs / "gateway.txt"
    until(lambda: log.is_file() and "rror" in log.read_text(), what="the refusal")
    until(
        lambda: gateway.is_file() and "with an unknown key" in gateway.read_text(),
        what="the gateway's word of it",
    )
    process.terminate()
    process.wait(timeout=60)
    assert "SuperNode ID" not in log.read_text() and nodes_of_keys.online() == 1
    nodes_of_keys.must_run("without", "rounds=1", "sampler.cohort=6", "engine.nodes=1")
    assert len(nodes_of_keys.roster("without")) == 1
    # its owner gets a folder with another key, and the data go into it
    number = nodes_of_keys.add_node()
    assert number == 3
    for name in ("data.csv", "node.toml"):
        shutil.copy(
            nodes_of_keys.deployment.node(2) / name, nodes_of_keys.deployment.node(3) / name
        )
    allow_any_number_of_runs(nodes_of_keys.deployment)
    rotated, log = nodes_of_keys.client(nodes_of_keys.copied(3, tmp_path / "rotated"))
    until(lambda: nodes_of_keys.online() == 2, what="the node with the new key")
    nodes_of_keys.must_run("rotated", "rounds=1")
    found = nodes_of_keys.roster("rotated")
    assert sorted(map(len, found.values())) == sorted(map(len, whole.values()))
    assert nodes_of_keys.clients("rotated") == [12] and found.keys() & whole.keys() != whole.keys()
    assert rotated.poll() is None
