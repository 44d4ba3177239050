# SPDX-License-Identifier: Apache-2.0
"""Deployments on loopback: results, secure sums and traffic."""

import contextlib
import json
import os
import sqlite3
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import pytest

from tests.runs import assert_close
from tests.simulations.deployment.federation import Federation, free_ports, until

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]

# A whole deployment on loopback: TLS, node keys, gateway, executors; the same numbers as a
# simulation; late nodes.


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
    client, _ = federation.client(node, "--data", tmp_path / "own.csv")
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


# Secure aggregation on real processes: a simulation's parameters, and no node's sum in the traffic.

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


def test_with_noise_of_the_clients_the_final_evaluation_gives_metrics(three):
    """Each node masks the sum of its clients, who have clipped and noised their updates; at the
    end, all held-out users are evaluated."""
    local = 'privacy={clip-norm=0.5, noise-multiplier=1.0, placement="local"}'
    three.must_run("local", SECURE, local, "sampler={name='full'}", "rounds=2")
    assert three.clients("local") == [18, 18] and "no sum" not in three.log("local")
    users = pd.read_csv(three.folder("local") / "users.csv")
    assert len(users) and users["hits@5"].notna().all()


# Traffic of a client: everything that passes the gateway is recorded and searched for the client's
# data.

USERS = ("zoe-qv81xk", "yan-77hhtz")  # names, ratings and times that occur nowhere else
OVERRIDES = ("sampler.cohort=2", "evaluation.final-users=1", "step.epochs=2", "rounds=3", "seed=3")
RATINGS, TIME = ("4.625", "3.375"), 1234567000


@pytest.fixture(scope="module")
def recorded(small, tmp_path_factory):
    """A federation of two real clients behind a recording gateway, and the folder of its records,
    after one run."""
    table = small()
    made = Federation(tmp_path_factory.mktemp("traffic") / "d", table, local_nodes=False)
    records = made.path / "records"
    records.mkdir()
    made.up()
    (port,) = free_ports(1)
    server = made.deployment.server
    files = [server / "gateway.crt", server / "gateway.key", made.deployment.authority, records]
    command = [
        sys.executable,
        str(Path(__file__).with_name("recording_gateway.py")),
        port,
        made.deployment.superlink,
        *files,
    ]
    made.others.append(subprocess.Popen([str(part) for part in command], env=made.environment()))
    catalogue = json.loads((made.deployment.node(1) / "catalogue.json").read_text())
    made.liked = {}
    try:
        for number, user in enumerate(USERS, 1):
            liked = catalogue["items"][number : 12 + number]
            made.liked[user] = [catalogue["items"].index(item) for item in liked]
            lines = [
                f"{user},{item},{RATINGS[number - 1]},{TIME + place},"
                for place, item in enumerate(liked)
            ]
            lines = [line + ("train" if place < 10 else "test") for place, line in enumerate(lines)]
            node = made.deployment.node(number)
            (node / "node.toml").unlink()
            own = made.path / f"own-{number}.csv"
            own.write_text("\n".join(["user,item,rating,time,part", *lines]) + "\n")
            made.client(node, "--data", own, superlink=f"localhost:{port}")
        until(lambda: made.online() == 2, what="two clients")
        made.finished, made.why = made.run("traffic", *OVERRIDES)
        made.records, made.port = records, port
        yield made
    finally:
        made.down()


def bodies(made, ending):
    return {file.name: file.read_bytes() for file in sorted(made.records.glob(f"*.{ending}"))}


def test_the_recording_is_of_the_whole_training(recorded):
    """Check of the search below: the trained sums must be found in the records, byte for byte."""
    assert recorded.finished and recorded.rounds("traffic") == 3, recorded.why
    sent = b"".join(bodies(recorded, "request").values())
    received = b"".join(bodies(recorded, "answer").values())
    for name, value in recorded.parameters("traffic").items():
        assert value.dtype == np.float32, name
    with np.load(min((recorded.folder("traffic") / "checkpoints").glob("round-*.npz"))) as file:
        after_first = {key: file[key] for key in file.files if key.startswith("param")}
    found = [value.tobytes() in received for value in after_first.values() if value.nbytes >= 64]
    # the parameters of round 1 were sent to the clients in round 2
    assert len(found) > 3 and all(found)
    assert b"num-clients" in sent and b"layer0.weight" in sent


def test_no_name_rating_time_or_list_of_items_leaves_a_client(recorded):
    sent = b"".join(bodies(recorded, "request").values())
    needles = {user: [user.encode()] for user in USERS}
    needles["rating"] = [text.encode() for text in RATINGS]
    needles["time"] = [str(TIME + place).encode() for place in range(12)]
    needles["time as a number"] = [np.int64(TIME + place).tobytes() for place in range(12)]
    needles["time as a number"] += [np.float64(TIME + place).tobytes() for place in range(12)]
    kinds = (np.int64, np.int32, np.float32, np.float64, np.uint8)
    needles["items"] = [
        np.array(liked[:4], kind).tobytes()
        for liked in recorded.liked.values()
        for kind in kinds[:4]
    ]
    for user, liked in recorded.liked.items():
        profile = np.zeros(30)
        profile[liked] = 1
        needles[f"profile of {user}"] = [profile.astype(kind).tobytes() for kind in kinds]
        needles[f"ratings of {user}"] = [
            np.full(4, float(rating), kind).tobytes()
            for rating in RATINGS
            for kind in (np.float32, np.float64)
        ]
    # The changed rows, which are sent by number, are the client's items and sampled negatives.
    for what, patterns in needles.items():
        if what != "items":
            assert not [pattern for pattern in patterns if pattern in sent], what
    with np.load(max((recorded.folder("traffic") / "checkpoints").glob("*.npz"))) as file:
        assert file.files


def test_the_server_learns_numbers_of_clients_under_opaque_ids(recorded):
    roster = recorded.roster("traffic")
    assert sorted(map(len, roster.values())) == [1, 1]
    ids = [clients[0] for clients in roster.values()]
    assert len(set(ids)) == 2 and all(number > 2**30 for number in ids)
    everything = b"".join(
        file.read_bytes() for file in recorded.folder("traffic").rglob("*") if file.is_file()
    )
    assert not any(user.encode() in everything for user in USERS)


def test_replayed_messages_change_nothing(recorded):
    """Every call of a node is replayed with its signature during a second run with the same
    seed."""
    run = recorded.start_run("replayed", *OVERRIDES)
    until(lambda: recorded.rounds("replayed") >= 1, what="a round")
    statuses = replay(recorded)
    recorded.must_finish(run)
    assert recorded.rounds("replayed") == 3
    assert_close(recorded.parameters("replayed"), recorded.parameters("traffic"))
    print({status: statuses.count(status) for status in set(statuses)})


def test_replayed_messages_change_nothing_after_a_restart(recorded):
    """SuperLink and gateway have forgotten all that they did not write down."""
    for name in ("gateway", "superlink"):
        recorded.kill(name)
    until(lambda: recorded.answers("superlink") and recorded.online() == 2, what="both nodes")
    run = recorded.start_run("restarted", *OVERRIDES)
    until(lambda: recorded.rounds("restarted") >= 1, what="a round")
    replay(recorded)
    recorded.must_finish(run)
    assert recorded.rounds("restarted") == 3
    assert_close(recorded.parameters("restarted"), recorded.parameters("traffic"))


def replay(recorded):
    """Send every call of the recorded nodes again; the statuses of the answers."""
    context = ssl.create_default_context(cafile=str(recorded.deployment.authority))
    statuses = []
    with httpx.Client(
        base_url=f"https://localhost:{recorded.deployment.settings.port}", verify=context
    ) as malicious:
        for file in sorted(recorded.records.glob("*-push-*.json")):
            about = json.loads(file.read_text())
            headers = {
                k: v for k, v in about["headers"].items() if k not in ("host", "content-length")
            }
            body = file.with_suffix(".request").read_bytes()
            statuses.append(
                malicious.post(about["path"], content=body, headers=headers, timeout=30).status_code
            )
    assert len(statuses) > 10
    assert all(status >= 400 for status in statuses if status != 200), statuses
    return statuses
