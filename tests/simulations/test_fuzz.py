# SPDX-License-Identifier: Apache-2.0
"""Damaged experiments and files end in errors that say what is wrong."""

import copy
import gzip
import io
import json
import shutil
import struct
import tarfile
import zipfile

import numpy as np
import pandas as pd
import pytest
import tomli_w
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import example, given
from hypothesis import strategies as st

from clients.device.own_data import read_own
from clients.device.policy import Policy, experiment_of, run_key
from fedrec.components.sections import override
from fedrec.data.download import unpack
from fedrec.data.reader import read_vectors
from fedrec.data.recognition import recognise
from fedrec.experiment.schema import load
from fedrec.privacy.accounting.accountant import Ledger
from fedrec.protocol.messages import TrainOrder, TrainSum, pack_order, pack_sum, read_arrays
from fedrec.protocol.serialization import _PACKED, for_the_network, from_the_network, to_record
from fedrec.report.comparison import compare
from fedrec.report.formats import comparison_text
from fedrec.report.page.sections import report
from fedrec.runs.folder import Result, RunFolder
from server.checkpoint import Checkpoints
from server.deployed.discovery import Discovery
from server.deployed.validation import ReplyValidator
from simulations import runner
from simulations.deployment.client import ClientPlan
from simulations.deployment.layout import Deployment
from simulations.export.folder import export
from simulations.own_table import OwnTable
from simulations.reproduce.recorded import FILE, recorded
from simulations.studies.declaration import declared
from simulations.studies.search import plan_of as plan_of_sweep
from simulations.studies.sweep import SweepFolder, _result_of, sweep, with_sweeps
from tests.simulations.helpers import fuzzed, spliced, told

# Random input from users, files and attackers is accepted or refused with a reason, never with a
# traceback.
#
# 2,250 inputs: experiments, overrides, data and catalogues of nodes, their settings, deployments,
# run folders and their checkpoints, and network messages.

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
    plan = told(lambda: ClientPlan(tmp_path, "x:1"))
    if not isinstance(plan, str):
        told(plan.check)
        told(plan.node_config)
    told(Policy.of, given_ if isinstance(given_, dict) else {})
    told(run_key, {"run": given_})
    told(experiment_of, {"resolved": given_})


@pytest.fixture(scope="module")
def finished(tiny_experiment, tmp_path_factory):
    table = {**tiny_experiment(), "privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0}}
    table["evaluation"]["baselines"] = ["popularity"]
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
        file.write_bytes(spliced(data.draw, before))


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
        key = data.draw(st.sampled_from(sorted(about)))
        text = json.dumps(changed(about, (key,), data.draw(VALUES)))
        arrays["about"] = np.frombuffer(text.encode(), np.uint8)
    else:
        name = data.draw(st.sampled_from(sorted(arrays)))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        arrays[name] = np.zeros(shape, data.draw(st.sampled_from(["f4", "i4", "u1"])))
        if kind == "gone":
            del arrays[name]
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    written = io.BytesIO()
    np.savez(written, **arrays)
    (tmp_path / "checkpoints" / newest.name).write_bytes(written.getvalue())
    digest = RunFolder(finished).experiment.digest()
    told(Checkpoints(tmp_path / "checkpoints", digest, keep=3).latest)


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
        pack_order(order, ArrayRecord({n: Array(v) for n, v in THETA.items()})), 2, "train"
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
        records = [MetricRecord({"a": 1}), ConfigRecord({"a": b"b"})]
        content["x"] = data.draw(st.sampled_from(records))
    reply = Message(content, reply_to=message)
    assert isinstance(ReplyValidator().trained([message], [reply], THETA), list)

    class Grid:
        def get_node_ids(self):
            return [2]

        def send_and_receive(self, messages, *, timeout=None):
            return [Message(content, reply_to=one) for one in messages]

    Discovery(Grid(), tmp_path / "roster.npz", timeout=1.0).refresh_roster()


# Random tables, archives, vectors, sweeps, studies, results and runs are read or refused with a
# reason, never with a traceback, and nothing is written outside of the folder that was asked for.
#
# 1,050 inputs, with those of `test_fuzz.py` and `test_fuzz_commands.py` 4,100; `FEDREC_FUZZ=10`
# tries ten times as many.

DEEP = "[" * 100_000

WORST = 'ann 1 5 -3 4.5 1e999 nan "" " 2020-01-01 26.05.2022 x|y 0x5 99999999999999999999 é'
CELLS = st.sampled_from([*WORST.split(), "", "a\tb"])
NAMES = st.sampled_from(["user", "item", "rating", "time", "Kunde", "x", "", "user", "\ufeffuser"])


@pytest.mark.slow
@fuzzed(150)
@given(
    st.lists(NAMES, max_size=5),
    st.lists(st.lists(CELLS, max_size=5), max_size=30),
    st.sampled_from([",", "\t", ";", "|", " ", "\r"]),
    st.binary(max_size=6),
    st.booleans(),
)
@example([], [], ",", b"\x00" * 5000, True)
@example(["user", "item"], [["1" * 200_000, "2"]], ",", b'"', True)
def test_own_tables(tmp_path, names, rows, separator, rest, rated):
    text = "\n".join(separator.join(row) for row in [names, *rows])
    (tmp_path / "d.csv").write_bytes(text.encode() + rest)
    try_own(tmp_path / "d.csv", rated)


def try_own(file, rated=True):
    """What `fedrec run --data` does before it trains."""
    found = told(lambda: recognise(file, {}, rated=rated))
    if not isinstance(found, str):
        assert 1 <= len(found.items_of) <= len(found.data)
        assert 1 <= len(found.users_of) <= len(found.data)
        assert all(isinstance(line, str) for line in found.lines())
        told(lambda: OwnTable(unrated=not rated).experiment(file, [], True))


COLUMNS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
    st.lists(st.floats(width=32), min_size=3, max_size=3),
    st.lists(st.text(max_size=5), min_size=3, max_size=3),
    st.lists(st.none() | st.booleans(), min_size=3, max_size=3),
    st.lists(st.binary(max_size=4), min_size=3, max_size=3),
    st.lists(st.datetimes(), min_size=3, max_size=3),
    st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=3, max_size=3),
    st.lists(st.decimals(-10, 10, places=2), min_size=3, max_size=3),
)


@pytest.mark.slow
@fuzzed(120)
@given(st.data())
def test_parquet_files(tmp_path, data):
    names = data.draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    table = {name: pd.Series(data.draw(COLUMNS), dtype=object) for name in names}
    file = tmp_path / "d.parquet"
    try:
        pd.DataFrame(table).to_parquet(file)
    except (ValueError, OverflowError, TypeError):  # pyarrow has no such column
        return
    if data.draw(st.booleans()):
        file.write_bytes(spliced(data.draw, file.read_bytes()))
    try_own(file)


MEMBERS = st.sampled_from(
    ["a.csv", "b/c.csv", "../x", "/x", "..", "", ".", "C:\\x", "a/../../x", "b", "a.csv/d", "é"]
) | st.text(max_size=8)


@st.composite
def archives(draw):
    """A zip or a tar of any members, possibly damaged."""
    content = io.BytesIO()
    names = draw(st.lists(MEMBERS, max_size=4))
    if draw(st.booleans()):
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as made:
            for name in names:
                info = zipfile.ZipInfo(name.replace("\x00", "") or "x")
                info.external_attr = draw(st.sampled_from([0, 0o120777 << 16, 0o100644 << 16]))
                made.writestr(info, bytes(draw(st.integers(0, 50))))
    else:
        with tarfile.open(fileobj=content, mode="w") as made:
            for name in names:
                info = tarfile.TarInfo(name)
                info.type = draw(st.sampled_from([b"0", b"1", b"2", b"3", b"5", b"6"]))
                info.linkname = draw(MEMBERS)
                info.size = 0 if info.type != b"0" else draw(st.integers(0, 50))
                made.addfile(info, io.BytesIO(bytes(info.size)))
    found = content.getvalue()
    if draw(st.booleans()):
        found = gzip.compress(found, mtime=0)  # tarfile writes the time, other inputs in each run
    for _ in range(draw(st.integers(0, 2))):
        found = spliced(draw, found)
    return found


@pytest.mark.slow
@fuzzed(150)
@given(archives())
def test_archives(tmp_path, content):
    shutil.rmtree(tmp_path / "deep", ignore_errors=True)
    inside = tmp_path / "deep" / "inside"
    inside.mkdir(parents=True)
    file = tmp_path / "archive"
    file.write_bytes(content)
    told(unpack, file, inside)
    found = {path for path in tmp_path.rglob("*") if inside not in (path, *path.parents)}
    assert found == {file, tmp_path / "deep"}
    assert not any(path.is_symlink() for path in inside.rglob("*"))


@fuzzed(80)
@given(st.data())
def test_vectors_of_items(tmp_path, data):
    ids = np.array(["a", "b", "c"])
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    kind = data.draw(st.sampled_from(["f4", "i8", "?", "U3", "c16", "M8[s]"]))
    file = tmp_path / "v.npy"
    np.save(file, np.zeros(shape, kind))
    (tmp_path / "v.txt").write_text(data.draw(st.sampled_from(["a\nb\nc\n", "a\n", "", "a\na"])))
    if data.draw(st.booleans()):
        file.write_bytes(spliced(data.draw, file.read_bytes()))
    found = told(lambda: read_vectors(file, ids, complete=data.draw(st.booleans())))
    assert isinstance(found, str) or np.isfinite(found.values).all()


@pytest.mark.slow
@fuzzed(100)
@given(st.text(max_size=30) | st.builds("{}={}".format, WORDS, WORDS), st.data())
@example("a=" + DEEP, None)
@example("rounds=[" + "1," * 20_000 + "]", None)
@example("strategy.server-lr={low=0.1, high=1e308, log=true}", None)
@example("strategy.server-lr={low=-1e308, high=1e308}", None)
def test_what_a_sweep_varies(tiny_experiment, text, data):
    if data is not None:
        key = data.draw(st.sampled_from(["rounds", "strategy.server-lr", "step.epochs", "x"]))
        value = data.draw(st.lists(VALUES, max_size=3))
        told(lambda: plan_of_sweep(tiny_experiment(), (), [f"{key}={json.dumps(value)}"]))
    told(lambda: plan_of_sweep(tiny_experiment(), (), [text]))
    told(lambda: plan_of_sweep(tiny_experiment(), (), [text], trials=3))


@pytest.fixture(scope="module")
def swept(tiny_experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    plan = plan_of_sweep(tiny_experiment(), (), ["strategy.server-lr=[0.1, 1.0]"])
    sweep(plan, folder)
    return folder


@pytest.mark.slow
@fuzzed(80)
@given(st.data())
def test_folders_of_sweeps(swept, data):
    files = [swept / "sweep.json", swept / "trials.json"]
    files += swept.glob("runs/*/result.json")
    within_damage(files, data, lambda: read_sweep(swept))


def read_sweep(folder):
    found = told(SweepFolder, folder)
    if not isinstance(found, str):
        told(_result_of, found)
    told(with_sweeps, [folder])


def within_damage(files, data, action):
    """Call with one of the files damaged, or nested more deeply than Python reads."""
    file = data.draw(st.sampled_from(sorted(files)))
    before = file.read_bytes()
    try:
        if data.draw(st.integers(0, 9)):
            damage(file, before, data)
        else:
            file.write_text(DEEP)
        action()
    finally:
        if file.is_dir():
            file.rmdir()
        file.write_bytes(before)


@pytest.mark.slow
@fuzzed(80)
@given(st.data())
def test_runs_that_are_compared_reported_and_exported(finished, tmp_path, data):
    """Every function that makes something of a finished run."""
    files = [p for p in finished.rglob("*") if p.is_file() and p.name != ".lock"]
    within_damage(files, data, lambda: use_run(finished, tmp_path))


def use_run(folder, output):
    result = told(lambda: RunFolder(folder).read_result())
    if isinstance(result, str):
        return
    compared = told(lambda: compare([result, result]))
    if not isinstance(compared, str):
        told(comparison_text, compared, "markdown")
    told(report, [result])
    shutil.rmtree(output / "export", ignore_errors=True)
    told(lambda: export(Result.load(folder), output / "export"))
    told(lambda: Result.load(folder).recommend(result.users.index[:1].tolist(), k=2))


STUDY = {
    "defaults": {"metrics": {"hits@10": "Hits@10"}},
    "sets": {"quiet": ["evaluation.every=0"]},
    "parts": {"one": {"name": "p", "experiment": "mf-ml1m", "row": "MF", "seconds": 30}},
    "table2": {
        "title": "Systems",
        "seeds": 2,
        "tasks": [
            {"name": "mf", "experiment": "mf-ml1m", "set": ["@quiet"], "row": "MF", "seconds": 30},
            {"name": "lr-{lr:g}", "vary": {"lr": [0.1, 0.5]}, "experiment": "x", "row": "{lr}",
             "set": ["strategy.server-lr={lr}"], "seconds": 3},
        ],
    },
}  # fmt: skip


@fuzzed(80)
@given(st.data())
def test_declarations_of_studies(tmp_path, data):
    table = copy.deepcopy(STUDY)
    place = data.draw(st.sampled_from(["study", "task", "text"]))
    value = data.draw(VALUES | st.sampled_from(["{", "{x}", "{lr:9999999999}", "@", "table2"]))
    if place == "task":
        task = data.draw(st.sampled_from(table["table2"]["tasks"]))
        task[data.draw(st.sampled_from([*task, "vary", "cases", "x"]))] = value
    else:
        path = data.draw(st.sampled_from([*paths_in(table), ("table2", "like"), ("x",)]))
        table = changed(table, path, value)
    try:
        text = tomli_w.dumps(table)
    except (TypeError, ValueError):
        text = "x = ["
    (tmp_path / "s.toml").write_text(text, encoding="utf-8", errors="replace")
    told(lambda: list(declared(tmp_path / "s.toml")))


@fuzzed(60)
@given(st.data())
def test_results_that_came_with_fedrec(tmp_path, data):
    known = json.loads(FILE.read_text())
    key = sorted(known)[0]
    table = {key: known[key]}
    path = data.draw(st.sampled_from(sorted(paths_in(table))))
    text = data.draw(
        st.sampled_from([DEEP, "", "{}", "[]"])
        | VALUES.map(lambda value: json.dumps(changed(table, path, value)))
    )
    (tmp_path / "results.json").write_text(text)
    told(recorded, tmp_path / "results.json")


@pytest.mark.usefixtures("identity")
@fuzzed(150)
@given(st.data())
def test_content_of_the_wire(data):
    """Bytes of a packed record: read, or left as they are, and never larger than allowed."""
    arrays = {
        "w": np.eye(6, dtype=np.float32),
        "rows": np.zeros((9, 2), np.float32),
        "n": np.arange(3),
    }
    content = for_the_network(RecordDict({"arrays": to_record(arrays)}))
    body = content["arrays"][_PACKED].data
    texts = [b"[1048576,1048576]", b'"fedrec.rows 1"', b'"O"', b"-1", b"[" * 9999]
    for _ in range(data.draw(st.integers(0, 3))):
        body = spliced(data.draw, body, st.binary(max_size=9) | st.sampled_from(texts))
    packed = Array("uint8", (len(body),), _PACKED, body)
    content["arrays"] = ArrayRecord({_PACKED: packed})
    found = from_the_network(content)
    if list(found["arrays"]) != [_PACKED]:
        assert sum(array.nbytes for array in read_arrays(found).values()) < 2**30
