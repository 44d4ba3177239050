# SPDX-License-Identifier: Apache-2.0
"""The operator's waiting; whole deployments are in `test_loopback.py`."""

from __future__ import annotations

import time
from types import SimpleNamespace

import httpx
import pytest

from fedrec.errors import EngineError
from simulations.deployment import operator
from simulations.deployment.flower import control


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
