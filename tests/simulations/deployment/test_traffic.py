# SPDX-License-Identifier: Apache-2.0
"""Traffic of a client: everything that passes the gateway is recorded and searched for the client's
data."""

import json
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import pytest

from tests.runs import assert_close
from tests.simulations.deployment.federation import Federation, free_ports, until

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]
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
            made.client(number, "--data", str(own), superlink=f"localhost:{port}")
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


def test_the_search_would_find_them(recorded):
    """The file itself, as if a client sent its data."""
    text = (recorded.path / "own-1.csv").read_bytes()
    assert (
        USERS[0].encode() in text and str(TIME + 3).encode() in text and RATINGS[0].encode() in text
    )


def test_the_server_learns_numbers_of_clients_under_opaque_ids(recorded):
    roster = recorded.roster("traffic")
    assert sorted(map(len, roster.values())) == [1, 1]
    ids = [clients[0] for clients in roster.values()]
    assert len(set(ids)) == 2 and all(number > 2**30 for number in ids)
    everything = b"".join(
        file.read_bytes() for file in recorded.folder("traffic").rglob("*") if file.is_file()
    )
    assert not any(user.encode() in everything for user in USERS)


def test_compressed_bytes_are_counted_as_they_are_on_the_wire(recorded):
    """The arrays in all messages that name a client's codes, whose table of contents says how long
    each is."""
    before = set(recorded.records.glob("*.request"))
    recorded.must_run("compressed", *OVERRIDES, "compression={name='rounding', bits=2}")
    lengths = []
    for file in sorted(set(recorded.records.glob("*.request")) - before):
        body = file.read_bytes()
        start = body.find(b'[["0#')
        if start >= 0:
            size = int.from_bytes(body[start - 8 : start], "little")
            table = json.loads(body[start : start + size])
            assert any(name.endswith("#codes") for name, *_ in table)
            lengths.append(sum(length for *_, length in table))
    rounds = pd.read_csv(recorded.folder("compressed") / "rounds.csv")
    plain = pd.read_csv(recorded.folder("traffic") / "rounds.csv")
    assert len(lengths) == 6 and sum(lengths) == rounds["bytes-up"].sum()
    assert rounds["bytes-up"].sum() < plain["bytes-up"].sum() / 4


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
