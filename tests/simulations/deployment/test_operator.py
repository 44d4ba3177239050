# SPDX-License-Identifier: Apache-2.0
"""The operator's waiting; whole deployments are in `test_loopback.py`."""

import logging
import time
from types import SimpleNamespace

import httpx
import pytest

from fedrec.errors import EngineError
from fedrec.experiment.sections import Section
from simulations.deployment import launch, operator
from simulations.deployment.flower import control
from simulations.deployment.processes import node
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
