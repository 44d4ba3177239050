# SPDX-License-Identifier: Apache-2.0
"""Random input on the command line, in messages, and in the files of nodes and servers is accepted
or refused with a reason, never with a traceback.

800 inputs; `FEDREC_FUZZ=10` tries ten times as many.
"""

import sys
from typing import Any, cast

import click
import numpy as np
import pytest
import typer
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from clients.storage.participation import Participation
from clients.storage.session_secrets import SessionSecrets
from fedrec.protocol import messages
from fedrec.protocol.orders import Presence
from fedrec.protocol.serialization import PackedArray, opened, packed
from server.deployed.discovery import Discovery
from server.deployed.roster_file import RosterFile
from simulations import cli
from tests.simulations.fuzzing import fuzzed, told

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
    body = bytearray(packed(arrays))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(body)))
        body[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    try:
        parts = opened(bytes(body))
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
    content = messages.pack_train(ArrayRecord({"w": Array(np.zeros(2, np.float32))}), order)
    keys = [*content["config"], "clients", "each", "protection", *KEYS]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        content["config"][key] = data.draw(VALUES)
    found = told(messages.unpack_train_order, content)
    assert isinstance(found, str | messages.TrainOrder)
    if not isinstance(found, str):
        assert isinstance(found.round, int) and isinstance(found.step, dict | None)
    found = told(lambda: messages.unpack_evaluate(content)[1])
    assert isinstance(found, str | messages.EvaluateOrder)


def damaged(content, data):
    """Some bytes of a file replaced, removed or inserted."""
    how = data.draw(st.sampled_from(["cut", "bytes", "text", "empty"]))
    place = data.draw(st.integers(0, len(content)))
    if how == "cut":
        return content[:place]
    if how == "bytes":
        return (
            content[:place] + data.draw(st.binary(min_size=1, max_size=40)) + content[place + 9 :]
        )
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
    from server.privacy.personal_budgets import uploads_in

    clients = Presence(0, np.array([1, 2]), np.array([3]))
    RosterFile(tmp_path / "whole.sqlite").add({7: clients})
    roster = (tmp_path / "whole.sqlite").read_bytes()
    (tmp_path / "whole.sqlite").unlink()
    (tmp_path / "roster.sqlite").write_bytes(damaged(roster, data))
    (tmp_path / "uploads.txt").write_bytes(damaged(b"1\n2\n2\n3\n", data))
    told(lambda: Discovery(cast(Any, None), tmp_path / "roster.sqlite", timeout=1.0))
    found = told(uploads_in, tmp_path / "uploads.txt")
    assert isinstance(found, str) or all(number > 0 for number in found)
