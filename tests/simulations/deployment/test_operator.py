# SPDX-License-Identifier: Apache-2.0
"""The operator's waiting; whole deployments are in `test_loopback.py`."""

import json
import logging
import time
from types import SimpleNamespace

import httpx
import pytest

from fedrec.errors import EngineError
from fedrec.experiment.sections import Section
from fedrec.runs.folder import RunFolder
from server import run
from server.callbacks.base import Callback
from server.exchange.dropped_replies import DroppedReplies
from simulations.deployment import launch, operator
from simulations.deployment.flower import control
from simulations.deployment.processes import node, supervisor
from simulations.deployment.processes.commands import Process
from simulations.deployment.processes.health import are_alive


@pytest.fixture
def superlink(monkeypatch):
    """A SuperLink that returns prepared answers in turn, and the last one forever."""
    answers, closed = [], []

    def nodes():
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return [SimpleNamespace(status=status) for status in found]

    made = SimpleNamespace(
        nodes=nodes, close=lambda: closed.append(True), answers=answers, closed=closed
    )
    monkeypatch.setattr(control, "Control", lambda *_: made)
    monkeypatch.setattr(operator.time, "sleep", lambda _: None)
    return made


def deployment(folder):
    return SimpleNamespace(superlink="127.0.0.1:1", authority=folder / "ca.crt", logs=folder)


def test_nodes_are_waited_for_while_a_busy_superlink_does_not_answer(superlink, tmp_path):
    superlink.answers += [
        httpx.ReadTimeout("busy"),
        ["online", "created"],
        httpx.ReadTimeout("busy"),
        ["online"] * 2,
    ]
    operator._wait_for_nodes(deployment(tmp_path), 2, time.monotonic() + 60)
    assert superlink.closed and len(superlink.answers) == 1


def test_nodes_that_do_not_come_online_are_reported(superlink, tmp_path):
    superlink.answers += [["online", "created"], httpx.ReadTimeout("busy")]
    with pytest.raises(EngineError, match="not all nodes came online") as caught:
        operator._wait_for_nodes(deployment(tmp_path), 2, time.monotonic() - 1)
    assert "1" in str(caught.value) and superlink.closed


@pytest.fixture
def quiet_log():
    """The log as Flower's processes leave it."""
    logger = logging.getLogger("fedrec")
    before = logger.disabled, logger.propagate, list(logger.handlers)
    logger.disabled = True
    yield logger
    logger.disabled, logger.propagate, logger.handlers[:] = before


def test_errors_of_a_nodes_work_are_in_its_own_log(quiet_log, monkeypatch, capfd):
    def work(*_):
        try:
            raise ValueError("row 7 is damaged")
        except ValueError as error:
            quiet_log.error("a message failed", exc_info=error)

    monkeypatch.setattr(node.executors, "client_executor", work)
    node.executor([])
    said = capfd.readouterr().err
    assert "ERROR a message failed" in said and "ValueError: row 7 is damaged" in said


def test_a_failed_run_with_a_plug_in_names_down_and_up(load_tiny, tmp_path):
    made = SimpleNamespace(path=tmp_path / "d")
    assert launch._restart_words(made, load_tiny()) == ""
    changed = load_tiny().model_copy(update={"step": Section(name="late-step")})
    words = launch._restart_words(made, changed)
    assert "'late-step'" in words and f"fedrec deploy down {made.path}, and up" in words


@pytest.mark.parametrize("content", ["[]", "3", '{"processes": [], "supervisor": 1}', "{"])
def test_a_damaged_list_of_processes_is_as_none(tmp_path, content):
    (tmp_path / "processes.json").write_text(content)
    assert operator.supervisor_of(deployment(tmp_path)) is None and not are_alive(tmp_path)


@pytest.mark.parametrize("entry", ["3", "{}", "null"])
def test_a_process_without_its_id_does_not_run(tmp_path, entry):
    (tmp_path / "processes.json").write_text(f'{{"processes": {{"nodes": {entry}}}}}')
    assert not are_alive(tmp_path)


@pytest.mark.parametrize(
    ("status", "until", "words", "overdue"),
    [
        ("online", 130.0, "0 s ago", False),
        ("online", 115.5, "14 s ago", False),
        ("online", 108.0, "(22 s; heartbeats come every 15 s, it is lost after 30 s)", True),
        ("offline", 92.0, "found lost 30 s after its last heartbeat", True),
        ("registered", 0.0, "never", True),
    ],
)
def test_it_is_said_when_a_node_was_last_heard_of(status, until, words, overdue):
    """Flower keeps the moment until which a node counts as online: two intervals after its last
    heartbeat."""
    node = control.NodeState(7, status, b"", "node-2", 15.0, until)
    assert words in node.heard(100.0) and node.overdue(100.0) is overdue


def test_restarts_of_nodes_are_counted_and_a_dead_process_stays_in_the_list(tmp_path, monkeypatch):
    logs = tmp_path / "nodes"
    commands = {"node-1/supernode": "exec sleep 60", "node-2/supernode": "exit 1"}
    processes = [Process(name, ("sh", "-c", command)) for name, command in commands.items()]
    made = supervisor.Supervisor(processes, logs, patience=0.1)
    for _ in range(3):
        made._step()
        made._write()
        time.sleep(0.3)
    monkeypatch.setattr(operator, "supervisor_of", lambda _: 1)
    found = operator.node_restarts(deployment(tmp_path))
    table = json.loads((logs / "processes.json").read_text())["processes"]
    made._end()
    assert found["node-1"] == 0 and found["node-2"] >= 1
    assert table["node-1/supernode"]["pid"] and "node-2/supernode" in table


def test_rounds_are_told_while_a_run_is_waited_for(load_tiny, tmp_path):
    folder = RunFolder.create(load_tiny("rounds=3"), tmp_path / "run")
    told = []

    class Told(Callback):
        def on_start(self, run, first_round, rounds):
            told.append((first_round, rounds))

        def after_round(self, row, seconds):
            told.append(row["round"])
            return False

        def on_message(self, text):
            told.append(text)

    watch = launch._Watch(folder, Told())
    watch.look()
    assert told == []
    rows = [{"round": number, "loss": 0.5} for number in (1, 2, 3)]
    times = [{"round": number, "seconds": 1.0} for number in (1, 2, 3)]
    folder.set_status("running", 0)
    watch.look()
    folder.write_rounds(rows[:2], times[:2])
    watch.look()
    watch.look()
    folder.write_rounds(rows, times)
    watch.look()
    assert told == [(1, 3), 1, 2, 3, "evaluating on the nodes"]


def test_people_read_names_of_nodes(load_tiny, tmp_path):
    """In the log, in rounds.csv and in the sentence at the end."""
    names = {"8545123412341234898": "node-2"}
    folder = RunFolder.create(load_tiny(), tmp_path / "run")
    with run._log_to(folder, names):
        logging.getLogger("fedrec").warning("node %d failed: %s", 8545123412341234898, "lost")
        logging.getLogger("fedrec").info("node %d joined; 123456789 rows", 7)
    log = folder.log_file.read_text()
    assert "WARNING node-2 failed: lost" in log and "node 7 joined; 123456789 rows" in log
    dropped = DroppedReplies(called=names)
    dropped.dropped(8545123412341234898, "failed: no answer")
    assert dropped.columns()["dropped-or-bounded"] == "node-2: failed: no answer"
    assert "(node-2 1)" in dropped.report(1)[0][0]
