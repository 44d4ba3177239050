# SPDX-License-Identifier: Apache-2.0
"""Random input from users, files and attackers is accepted or refused with a reason, never with a
traceback.

2,250 inputs: experiments, overrides, data and catalogues of nodes, their settings,
deployments, run folders and their checkpoints, and network messages.
"""

import copy
import io
import json
import shutil
import struct

import numpy as np
import pytest
import tomli_w
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from hypothesis import example, given
from hypothesis import strategies as st

from clients.device.own_data import read_own
from clients.device.policy import Policy, experiment_of, run_key
from fedrec.experiment.loading import load
from fedrec.experiment.overrides import override
from fedrec.privacy.ledger import Ledger
from fedrec.protocol.messages import pack_sum, pack_train
from fedrec.protocol.orders import TrainOrder, TrainSum
from fedrec.runs.folder import RunFolder
from server.checkpoint import Checkpoints
from server.deployed.discovery import Discovery
from server.deployed.reply_validation import ReplyValidator
from simulations.deployment.client import plan_of
from simulations.deployment.layout import Deployment
from tests.simulations.fuzzing import fuzzed, told

NUMBERS = st.integers() | st.floats() | st.sampled_from([2**63, -(2**63) - 1, 1e30, 10**400, -0.0])
WORDS = st.text(max_size=20) | st.sampled_from(
    ["", "\x00", "../x", "a" * 5000, "1e999", "nan", "os:system", "*", "["]
)
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def paths_in(table, before=()):
    """Every key of nested tables."""
    for key, value in table.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths_in(value, (*before, key))


def changed(table, path, value):
    """A copy of nested tables with one value replaced."""
    found = inner = copy.deepcopy(table)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


@pytest.mark.slow
@fuzzed(250)
@given(st.data())
def test_experiments(load_tiny, data):
    table = load_tiny().table()
    path = data.draw(st.sampled_from(sorted(paths_in(table))))
    told(load, changed(table, path, data.draw(VALUES)))


@fuzzed(250)
@given(st.text(max_size=200))
@example("[" * 5000)
@example("a = " + "[" * 2000 + "]" * 2000)
@example("name = 'x'\nrounds = 1\n[dataset]\nname = '\\u0000'")
def test_experiment_files(tmp_path, text):
    (tmp_path / "e.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    told(load, tmp_path / "e.toml")


@fuzzed(250)
@given(st.text(max_size=60) | st.builds("{}={}".format, WORDS, WORDS), WORDS)
@example("x=" + "[" * 5000, "")
@example("privacy.noise-multiplier=1e30", "a" * 5000)
def test_overrides_and_names(tiny_experiment, text, name):
    told(override, tiny_experiment(), text)
    told(load, tiny_experiment(), [text])
    told(load, name)


CELL = st.sampled_from(
    ["ann", "1", "5", "-3", "1e999", "nan", "", '"', "2020-01-01", str(2**63 + 5), "x|y", "train"]
)


@pytest.fixture(scope="module")
def shard(load_tiny, tmp_path_factory):
    from simulations.deployment.shards import cut

    folder = tmp_path_factory.mktemp("shard")
    cut(load_tiny(), [folder])
    return folder


@fuzzed(250)
@given(
    st.lists(
        st.sampled_from(["user", "item", "rating", "time", "part", "gender", "x", ""]), max_size=7
    ),
    st.lists(st.lists(CELL, max_size=7), max_size=5),
    st.binary(max_size=8),
)
def test_data_of_nodes(shard, tmp_path, header, rows, rest):
    text = "\n".join(",".join(row) for row in [header, *rows]).encode() + rest
    (tmp_path / "d.csv").write_bytes(text)
    told(read_own, tmp_path / "d.csv", shard / "catalogue.json")


@pytest.mark.slow
@fuzzed(250)
@given(st.data())
def test_catalogues(shard, tmp_path, data):
    table = json.loads((shard / "catalogue.json").read_text())
    path = data.draw(st.sampled_from(sorted(paths_in(table))))
    changes = data.draw(
        VALUES | st.just(table[path[0]] * 2 if isinstance(table[path[0]], list) else 3)
    )
    (tmp_path / "c.json").write_text(json.dumps(changed(table, path, changes)))
    told(read_own, shard / "data.csv", tmp_path / "c.json")


@pytest.mark.slow
@fuzzed(250)
@given(
    st.text(max_size=80)
    | st.dictionaries(WORDS, SCALARS.filter(lambda v: v is not None), max_size=4)
)
def test_settings_of_nodes_and_deployments(tmp_path, given_):
    try:
        text = given_ if isinstance(given_, str) else tomli_w.dumps(given_)
        content = text.encode()
    except (ValueError, TypeError):
        content = b"\xff\xfe"
    for name in ("node.toml", "deployment.toml"):
        (tmp_path / name).write_bytes(content)
    told(Deployment, tmp_path)
    plan = told(lambda: plan_of(tmp_path, "x:1"))
    if not isinstance(plan, str):
        told(plan.check)
        told(plan.node_config)
    told(Policy.of, given_ if isinstance(given_, dict) else {})
    told(run_key, {"run": given_})
    told(experiment_of, {"resolved": given_})


@pytest.fixture(scope="module")
def finished(tiny_experiment, tmp_path_factory):
    from simulations import runner

    table = {**tiny_experiment(), "privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0}}
    return runner.run(table, output=tmp_path_factory.mktemp("run") / "run").folder


def read_all(folder):
    """All functions that read a run folder."""
    run = told(RunFolder, folder)
    if isinstance(run, str):
        return
    told(run.status)
    told(run.read_result)
    told(run.read_baselines)
    told(Ledger, folder / "privacy.jsonl")
    experiment = told(lambda: run.experiment)
    if not isinstance(experiment, str):
        told(Checkpoints(run.checkpoints, experiment.digest(), keep=3).latest)


@pytest.fixture(scope="module")
def damaged(finished, tmp_path_factory):
    """A copy of the run, and its files."""
    folder = shutil.copytree(finished, tmp_path_factory.mktemp("damaged") / "run")
    return folder, sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


@pytest.mark.slow
@fuzzed(250)
@given(st.data())
def test_run_folders(damaged, data):
    folder, files = damaged
    file = data.draw(st.sampled_from(files))
    before = file.read_bytes()
    try:
        damage(file, before, data)
        read_all(folder)
    finally:
        if file.is_dir():
            file.rmdir()
        file.write_bytes(before)


def damage(file, before, data):
    """Remove, cut or change a file, or put a folder in its place."""
    how = data.draw(st.sampled_from(["gone", "cut", "bytes", "value", "json", "folder"]))
    if how == "gone":
        file.unlink()
    elif how == "folder":
        file.unlink()
        file.mkdir()
    elif how == "cut":
        file.write_bytes(before[: data.draw(st.integers(0, len(before)))])
    elif how == "value" and file.suffix == ".json":
        table = json.loads(before)
        nested = isinstance(table, dict) and bool(table)
        path = data.draw(st.sampled_from(sorted(paths_in(table)))) if nested else ()
        file.write_text(json.dumps(changed(table, path, data.draw(VALUES)) if path else 5))
    elif how == "json":
        file.write_text(json.dumps(data.draw(VALUES)))
    else:
        place = data.draw(st.integers(0, len(before)))
        file.write_bytes(before[:place] + data.draw(st.binary(max_size=9)) + before[place:])


@pytest.mark.slow
@fuzzed(250)
@given(st.data())
def test_checkpoints(finished, tmp_path, data):
    newest = max((finished / "checkpoints").glob("*.npz"))
    with np.load(newest) as file:
        arrays = {name: file[name] for name in file.files}
    about = json.loads(arrays["about"].tobytes())
    kind = data.draw(st.sampled_from(["about", "array", "gone"]))
    if kind == "about":
        text = json.dumps(
            changed(about, (data.draw(st.sampled_from(sorted(about))),), data.draw(VALUES))
        )
        arrays["about"] = np.frombuffer(text.encode(), np.uint8)
    else:
        name = data.draw(st.sampled_from(sorted(arrays)))
        arrays[name] = np.zeros(
            data.draw(st.lists(st.integers(0, 3), max_size=3)),
            data.draw(st.sampled_from(["f4", "i4", "u1"])),
        )
        if kind == "gone":
            del arrays[name]
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    written = io.BytesIO()
    np.savez(written, **arrays)
    (tmp_path / "checkpoints" / newest.name).write_bytes(written.getvalue())
    told(
        Checkpoints(
            tmp_path / "checkpoints", RunFolder(finished).experiment.digest(), keep=3
        ).latest
    )


THETA = {"w": np.zeros((4, 2), dtype=np.float32), "b": np.zeros(3, dtype=np.float32)}
SUM = TrainSum({n: np.ones_like(v) for n, v in THETA.items()}, 2, 2.0, 9, 1.0, 2)
METRIC = st.integers(-(2**62), 2**62) | st.floats()
RAW = st.builds(
    lambda shape, kind, size: Array(
        kind, tuple(shape), "numpy.ndarray", struct.pack("<d", 1.0) * size
    ),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(["float32", "int64", "object", "", "<U9"]),
    st.integers(0, 5),
)


@pytest.mark.usefixtures("identity")
@fuzzed(250)
@given(st.data())
def test_answers_of_nodes(tmp_path, data):
    order = TrainOrder(1, np.array([1, 2]), "uniform", {"name": "sgd"})
    message = Message(
        pack_train(ArrayRecord({n: Array(v) for n, v in THETA.items()}), order), 2, "train"
    )
    content = pack_sum(SUM)
    for record in list(content):
        if data.draw(st.booleans()):
            del content[record]
    for record in content.metric_records.values():
        record[data.draw(st.sampled_from(sorted(record)))] = data.draw(METRIC)
    for record in content.array_records.values():
        names = sorted(record) + [f"w{mark}" for mark in ("#rows", "#values", "#table", "#")]
        for name in data.draw(st.lists(st.sampled_from(names), max_size=3)):
            record[name] = data.draw(RAW)
    if data.draw(st.booleans()):
        content["x"] = data.draw(
            st.sampled_from([MetricRecord({"a": 1}), ConfigRecord({"a": b"b"})])
        )
    assert isinstance(
        ReplyValidator().trained([message], [Message(content, reply_to=message)], THETA), list
    )

    class Grid:
        def get_node_ids(self):
            return [2]

        def send_and_receive(self, messages, *, timeout=None):
            return [Message(content, reply_to=one) for one in messages]

    Discovery(Grid(), tmp_path / "roster.sqlite", timeout=1.0).refresh_roster()
