# SPDX-License-Identifier: Apache-2.0
"""Damaged commands and plug-ins end in errors that say what is wrong.

A broken plug-in is reported with its file and the reason, and the rest of fedrec works.

Each kind is broken in up to five ways: it cannot be imported, a method has the wrong signature, it
returns NaN, it returns wrong shapes, it changes its input.
"""

import sys
import textwrap
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, cast
from uuid import uuid4

import click
import numpy as np
import pytest
import typer
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from clients.participation import Participation
from clients.storage import SessionSecrets
from fedrec.components import registry
from fedrec.protocol import messages
from fedrec.protocol.messages import Presence
from fedrec.protocol.serialization import PackedArray, opened, packed
from server.deployed.discovery import Discovery, _write_roster
from simulations import cli
from tests.simulations.helpers import fuzzed, spliced, told

# Random input on the command line, in messages, and in the files of nodes and servers is accepted
# or refused with a reason, never with a traceback.
#
# 800 inputs; `FEDREC_FUZZ=10` tries ten times as many.

SPLIT = "x ../x /nowhere/x * [ a=b a.b=[[[ é ' - -- 0 -1 1e30 nan inf 1.5 localhost:1 tiny.toml run"
WORDS = st.sampled_from([*SPLIT.split(), "", '"', "a" * 5000, str(2**70), "d.csv"]) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12
)
LEFT_OUT = {"doctor", "data fetch"}
"""One checks the whole installation; the other downloads for valid names."""


def commands(group, before=()):
    """Every command with its names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*before, name))
        elif " ".join((*before, name)) not in LEFT_OUT:
            yield (*before, name), command


COMMANDS = dict(commands(typer.main.get_command(cli.app)))


@st.composite
def lines(draw):
    """A command line: a command, with or without a value for each of its parameters."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    line = list(name)
    for parameter in COMMANDS[name].get_params(click.Context(COMMANDS[name])):
        if isinstance(parameter, click.Argument):
            if draw(st.integers(0, 9)):
                line.append(draw(WORDS))
        elif parameter.name != "help" and not draw(st.integers(0, 3)):
            line.append(parameter.opts[0])
            if not getattr(parameter, "is_flag", False):
                line.append(draw(WORDS))
    return line


@pytest.fixture(scope="module")
def place(tiny_experiment, tmp_path_factory):
    """A folder with a valid experiment, deep enough that `../x` stays inside."""
    import tomli_w

    folder = tmp_path_factory.mktemp("place") / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "tiny.toml").write_text(tomli_w.dumps(tiny_experiment()))
    (folder / "d.csv").write_text("user,item\n1,2\n")
    return folder


@pytest.mark.slow
@fuzzed(120)
@given(lines())
def test_command_lines(place, monkeypatch, capfd, line):
    monkeypatch.chdir(place)
    run_command(line, monkeypatch, capfd)


COUNTS = st.sampled_from([1, 2, 10, 1000, 10**6, 10**9, 2**62, 2**70, 0, -1, 1.5])
REALS = st.sampled_from(
    [1.0, 0.3, 5.0, 1e-5, 1e-9, 1e-12, 1e-30, 1e-308, 1e9, 1e30, 1e300, 0.0, -1.0, 1.0 - 1e-16]
)
SIDES = [("fixed-size", "replace-one"), ("poisson", "add-remove")]


@pytest.mark.slow
@fuzzed(100)
@given(st.data())
def test_numbers_of_the_accounting_commands(monkeypatch, capfd, data):
    """Whatever number of clients and rounds, noise, epsilon and delta, and soon."""
    name, real = data.draw(
        st.sampled_from([("epsilon", "--noise-multiplier"), ("calibrate", "--epsilon")])
    )
    sampler, adjacency = data.draw(st.sampled_from(SIDES))
    backend = data.draw(st.sampled_from(["autodp", "pld"]))
    mechanism = data.draw(st.sampled_from(["gaussian", "laplace"]))
    line = ["privacy", name, real, data.draw(REALS), "--delta", data.draw(REALS)]
    for option in ("--clients", "--cohort", "--rounds"):
        line += [option, data.draw(COUNTS)]
    line += ["--sampler", sampler, "--adjacency", adjacency, "--backend", backend]
    run_command([*map(str, line), "--mechanism", mechanism], monkeypatch, capfd)


def run_command(line, monkeypatch, capfd):
    """Run a command in this process; it ends well, or says what is wrong."""
    monkeypatch.setattr(sys, "argv", ["fedrec", *line])
    with pytest.raises(SystemExit) as end:
        cli.main()
        raise SystemExit(0)
    output = capfd.readouterr()
    text = output.out + output.err
    assert "Traceback" not in text, line
    assert not end.value.code or text.strip(), line


@fuzzed(200)
@given(st.data())
def test_packed_arrays(data):
    """An invalid message body is an error that the reader of the message catches."""
    arrays = [PackedArray("w", "float32", (2,), "numpy.ndarray", b"\0" * 8)]
    body = packed(arrays)
    for _ in range(data.draw(st.integers(0, 3))):
        body = spliced(data.draw, body)
    try:
        parts = opened(body)
    except Exception as error:
        assert not isinstance(error, MemoryError)
        return
    assert sum(len(part.data) for part in parts) <= len(body)


NUMBERS = st.sampled_from([0, -1, 2**62, 1.5, float("nan"), float("inf"), True])
LISTS = st.sampled_from([[1, 2], [-1], [0.5], ["a"], [b"x"]])
VALUES = NUMBERS | LISTS | st.sampled_from(["", "x", "{}", "[[", "null", "[1]", b"", b"\0" * 9])
KEYS = ("secure-bits", "secure-session", "server-round", "lr", "x")


@pytest.mark.usefixtures("identity")
@fuzzed(200)
@given(st.data())
def test_a_damaged_order_is_refused_in_words(data):
    order = messages.TrainOrder(1, np.array([0]), "uniform", {"name": "sgd"})
    content = messages.pack_order(order, ArrayRecord({"w": Array(np.zeros(2, np.float32))}))
    keys = [*content["config"], "clients", "each", "protection", *KEYS]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        content["config"][key] = data.draw(VALUES)
    for kind in (messages.TrainOrder, messages.EvaluateOrder):
        found = told(messages.unpack_order, kind, content)
        assert isinstance(found, str | kind)
        if not isinstance(found, str):
            assert isinstance(found.round, int) and isinstance(found.step, dict | None)


def damaged(content, data):
    """Some bytes of a file replaced, removed or inserted."""
    how = data.draw(st.sampled_from(["cut", "bytes", "text", "empty"]))
    if how == "cut":
        return content[: data.draw(st.integers(0, len(content)))]
    if how == "bytes":
        return spliced(data.draw, content, st.binary(min_size=1, max_size=40))
    return b"" if how == "empty" else data.draw(st.text(max_size=30)).encode("utf-8", "replace")


PRIVATE_FILES = [Participation, SessionSecrets]


@pytest.fixture(scope="module")
def private_files(tmp_path_factory):
    """What each file holds after its first use."""
    files = {kind: tmp_path_factory.mktemp("private") / "x.sqlite" for kind in PRIVATE_FILES}
    for kind, file in files.items():
        use(kind, file)
    return {kind: file.read_bytes() for kind, file in files.items()}


@pytest.mark.slow
@fuzzed(80)
@given(st.data())
def test_private_files_of_nodes(private_files, tmp_path, data):
    """A damaged file is named: a node without its spent budgets must not train."""
    file = tmp_path / "private.sqlite"
    file.touch(0o600)
    kind = data.draw(st.sampled_from(PRIVATE_FILES))
    file.write_bytes(damaged(private_files[kind], data))
    told(use, kind, file)


def use(kind, file):
    if kind is Participation:
        Participation(file).spent()
        Participation(file).numbers(["ann"])
    else:
        SessionSecrets(file).channel(b"1" * 32)


@pytest.mark.slow
@fuzzed(100)
@given(st.data())
def test_files_of_a_server(tmp_path, data):
    """Roster and counts of uploads."""
    from server.privacy.personal_budgets import _uploads_in

    clients = Presence(0, np.array([1, 2]), np.array([3]))
    _write_roster(tmp_path / "whole.npz", {7: clients})
    roster = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "whole.npz").unlink()
    (tmp_path / "roster.npz").write_bytes(damaged(roster, data))
    (tmp_path / "uploads.txt").write_bytes(damaged(b"1\n2\n2\n3\n", data))
    told(lambda: Discovery(cast(Any, None), tmp_path / "roster.npz", timeout=1.0))
    found = told(_uploads_in, tmp_path / "uploads.txt")
    assert isinstance(found, str) or all(number > 0 for number in found)


HEAD = """
import math
from dataclasses import replace

import numpy as np
import torch
from clients.steps.descent import Update, one_by_one
from clients.step import Step
from clients.steps.sgd import Sgd
from fedrec.baselines.base import Baseline
from fedrec.data.interactions import Interactions
from fedrec.data.readers.synthetic import Synthetic
from fedrec.data.splits.rules import UserHoldout
from fedrec.models.privrec import PrivRec
from fedrec.training.results import Dense
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from server.callbacks import Callback
from server.samplers import Sampler
from strategies.sums import Reptile

class Alone(Step):
    def train_block(self, parameters, block, client_params=None):
        return one_by_one(parameters, block, client_params, self.alone)
"""


def bad(base, method, body="..."):
    """The text of a class with one method of its own."""
    return f"class Bad({base}):\n def {method}:\n" + textwrap.indent(body, "  ")


def predicting(body):
    """A model with other predictions; `found` are the right ones."""
    body = f"found = super().predict(parameters, users, items, rows)\n{body}"
    return bad("PrivRec", "predict(self, parameters, users, items, rows=None)", body)


def scoring(scores):
    """A centralised system with these scores."""
    return f"{bad('Baseline', 'fit(self, histories)')}\n def scores(self, histories): {scores}"


applying = partial(bad, "Reptile", "apply(self, theta, aggregate)")
drawing = partial(bad, "Sampler", "draw(self, random)")
reading = partial(bad, "Synthetic", "read(self)")
splitting = partial(bad, "UserHoldout", "split(self, interactions)")
alone = partial(bad, "Alone", "alone(self, parameters, data, random)")
BROKEN = {
    # kind, how: (the class, what the error says)
    ("step", "signature"): (bad("Step", "train_block(self, parameters)"), "TypeError"),
    ("step", "nan"): (
        alone("return Update({n: v * math.nan for n, v in parameters.items()}, 1, 0.0)"),
        "NaN or infinity in",
    ),
    ("step", "shapes"): (
        alone("return Update({n: v.sum() for n, v in parameters.items()}, 1, 0.0)"),
        "'item.id': (3,)",
    ),
    ("step", "no-update"): (alone("return {}"), "got dict"),
    ("step", "raises"): (alone("return 1 / 0"), "ZeroDivision"),
    ("model", "nan"): (predicting("return found * math.nan"), "expected: finite predictions"),
    ("model", "shapes"): (predicting("return found.unsqueeze(-1)"), "got: (2, 3, 1)"),
    ("strategy", "abstract"): (
        "from strategies.base import CohortStrategy\nclass Bad(CohortStrategy):\n pass",
        "got: no apply",
    ),
    ("strategy", "nan"): (
        applying("return {n: v * math.nan for n, v in theta.items()}"),
        "training diverged in round 1",
    ),
    ("strategy", "shapes"): (
        applying("return {n: v.ravel() for n, v in theta.items()}"),
        "expected: the shapes {'user.",
    ),
    ("strategy", "of-flower"): (
        bad(
            "FlowerFedAvg",
            "aggregate_train(self, server_round, replies)",
            "raise LookupError('no more replies')",
        ),
        "LookupError: no more replies",
    ),
    ("sampler", "shapes"): (drawing("return self.clients[:, None][:3]"), "got: int64 [3, 1]"),
    ("sampler", "repeats"): (drawing("return self.clients[[0, 0, 1]]"), "ascending and distinct"),
    ("sampler", "mutates"): (drawing("self.clients += 1\nreturn self.clients[:2]"), "read-only"),
    ("dataset", "shapes"): (reading("return super().read().frame()"), "got: DataFrame"),
    ("dataset", "nan"): (
        reading("data = super().read()\nreturn replace(data, ratings=data.ratings * math.nan)"),
        "a rating is not finite",
    ),
    ("split", "shapes"): (splitting("return 3"), "'int' object has no attribute"),
    ("split", "mutates"): (splitting("interactions.users[0] = 1"), "read-only"),
    ("baseline", "nan"): (
        scoring("return torch.full((histories.num_users, histories.num_items), math.nan)"),
        "got: NaN",
    ),
    ("callback", "raises"): (
        bad("Callback", "after_round(self, row, seconds)", "row['no']"),
        "KeyError: 'no'",
    ),
}


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """Writes a module with a class `Bad`, with the entry point `bad` in `fedrec.KIND`; returns its
    file."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(kind, body, head=HEAD):
        name = f"broken_{uuid4().hex}"  # never imported before
        file = tmp_path / f"{name}.py"
        file.write_text(head + body + "\n")
        entry = EntryPoint("bad", f"{name}:Bad", f"fedrec.{kind}")
        found = lambda group: [entry] if group == entry.group else []  # noqa: E731
        monkeypatch.setattr(registry, "entry_points", found)
        return file

    return write


def chosen(kind):
    """The override by which an experiment uses the plug-in."""
    lists = {"baseline": "evaluation.baselines=['bad']", "callback": "callbacks=[{name='bad'}]"}
    return lists.get(kind, f"{kind}.name=bad")


@pytest.mark.parametrize(("kind", "how"), BROKEN)
def test_a_run_with_a_broken_plug_in_names_it_and_the_reason(
    kind, how, plugin, tiny_file, fedrec, tmp_path
):
    body, reason = BROKEN[kind, how]
    file = plugin(kind, body)
    code, out, err = fedrec("run", tiny_file, "-o", tmp_path / "run", "-s", chosen(kind))
    text = " ".join(err.split())
    assert code not in (0, None) and "Traceback" not in out + err
    assert "error:" in err and reason in text, err
    if (kind, how) != ("dataset", "nan"):  # the invalid interactions are reported themselves
        assert str(file) in err or "is an abstract" in err, err


def test_an_abstract_class_is_seen_in_the_list(plugin, fedrec):
    plugin("strategy", BROKEN["strategy", "abstract"][0])
    code, out, _ = fedrec("list", "strategy")
    (broken,) = [line for line in out.splitlines() if "BROKEN: " in line]
    assert code == 0 and broken.split()[:2] == ["strategy", "bad"]
    assert "abstract" in broken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "import no_such_module_here",
            "ModuleNotFoundError: No module named 'no_such_module_here'",
        ),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_an_import_error_is_reported_and_the_rest_works(
    line, reason, plugin, fedrec, tiny_file, tmp_path
):
    file = plugin("step", line, head="")
    code, out, err = fedrec("list")
    (broken,) = [line for line in out.splitlines() if "BROKEN" in line]
    assert code == 0 and broken.split()[:2] == ["step", "bad"] and reason in broken
    assert "Traceback" not in err
    code, out, err = fedrec("run", tiny_file, "-o", tmp_path / "bad", "-s", "step.name=bad")
    assert code == 2 and reason in err and f"{file}, line 1" in err and "Traceback" not in out + err
    code, _, _ = fedrec("run", tiny_file, "-o", tmp_path / "good", "--quiet")
    assert code == 0


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_it_is_named_as_well(plugin, tiny_file, fedrec, tmp_path, monkeypatch):
    """The node is another process, which finds the module by PYTHONPATH and without an entry
    point."""
    file = plugin("step", BROKEN["step", "shapes"][0])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    arguments = ["--engine", "ray", "-s", "engine.nodes=1", "-s", f"step.name={file.stem}:Bad"]
    code, out, err = fedrec("run", tiny_file, "-o", tmp_path / "run", *arguments)
    assert code not in (0, None)
    assert "Traceback" not in out + err
    assert str(file) in err
    assert "'item.id': (6,)" in err
