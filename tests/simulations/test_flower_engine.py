# SPDX-License-Identifier: Apache-2.0
"""The flower engine: a real `flwr run` gives the serial engine's numbers, and leaves nothing
behind."""

import os
import signal

import pytest

from fedrec.runs.folder import RunFolder
from server.callbacks.base import Callback
from tests.runs import assert_same_run
from tests.simulations.listening import listening_below

pytestmark = pytest.mark.flower


class Recorder(Callback):
    def __init__(self):
        self.told = []

    def on_start(self, run, first_round, rounds):
        self.told.append((first_round, rounds))

    def after_round(self, row, seconds):
        self.told.append(int(row["round"]))
        return False

    def on_end(self, result):
        self.told.append("end")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_flower_gives_the_serial_engines_numbers(run_tiny, monkeypatch, tmp_path, leftovers):
    serial = run_tiny(output="serial")
    monkeypatch.setenv("FEDREC_TEST_MARK", str(tmp_path))
    recorder = Recorder()
    result = run_tiny("engine.name=flower", output="flower", callbacks=[recorder])
    assert RunFolder(result.folder).status() == {"state": "finished", "round": 2}
    assert_same_run(result, serial, ids=False, atol=1e-6)
    assert result.metrics == serial.metrics
    assert recorder.told == [(1, 2), 1, 2, "end"]
    assert leftovers(f"FEDREC_TEST_MARK={tmp_path}") == []


class Interrupt(Callback):
    """Looks at the engine's processes after the first round, and ends the run as a signal does."""

    def after_round(self, row, seconds):
        self.own, self.others = listening_below(os.getpid())
        os.kill(os.getpid(), signal.SIGTERM)
        return False


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_interrupted_run_leaves_no_process_and_was_reached_from_this_machine_only(
    run_tiny, monkeypatch, tmp_path, leftovers
):
    """The executor and the simulation are in a session of their own and would finish the run."""
    monkeypatch.setenv("FEDREC_TEST_MARK", str(tmp_path))
    watch = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        run_tiny("engine.name=flower", "rounds=100000", output="flower", callbacks=[watch])
    assert leftovers(f"FEDREC_TEST_MARK={tmp_path}") == []
    status = RunFolder(tmp_path / "flower").status()
    assert status["state"] == "interrupted" and 1 <= status["round"] < 100000
    assert len(watch.own) and not watch.others, watch.others
