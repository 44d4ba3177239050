# SPDX-License-Identifier: Apache-2.0
"""Faults of a machine, and sizes measured on it."""

import errno
import os
import resource
import signal
import time

import pytest

from fedrec.errors import ClientError, EngineError, RunError
from fedrec.runs.folder import RunFolder
from fedrec.runtime import files
from server.callbacks import Callback
from simulations import runner
from simulations.engines.ray import RayGrid, _reason_of, _stored
from tests.runs import assert_close, assert_same_run, parameters_in

ROUNDS = "rounds=4"
SYSTEMS = {
    "shared": (),
    "private parameters": ('step.private-parameters=["layer1.*"]',),
    "privacy": ("privacy={clip-norm=1.0, noise-multiplier=1.0}",),
}


class After(Callback):
    """Does something after a round."""

    def __init__(self, round_number, action):
        super().__init__()
        self.round = round_number
        self.action = action

    def after_round(self, row, seconds):
        if row["round"] == self.round:
            self.action()
        return False


@pytest.fixture
def faulty(monkeypatch):
    """Makes every new file of a run fail with an error number."""

    def begin(number):
        def refuse(path, *given):
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(files, "_beside", refuse)

    return begin


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_folder_that_cannot_be_written_ends_a_run_that_can_be_resumed(
    run_tiny, tmp_path, faulty, monkeypatch, code, system
):
    whole = run_tiny(ROUNDS, *SYSTEMS[system], output="whole")
    with pytest.raises(RunError, match="cannot write") as error:
        run_tiny(
            ROUNDS, *SYSTEMS[system], output="broken", callbacks=[After(2, lambda: faulty(code))]
        )
    assert os.strerror(code) in error.value.text() and "fix:" in error.value.text()
    monkeypatch.undo()
    assert_goes_on(tmp_path / "broken", whole, system)


def assert_goes_on(folder, whole, system):
    """The resumed run has the bits of one without a fault."""
    found = runner.resume(folder)
    if system == "privacy":  # a repeated round is charged again
        assert_close(parameters_in(found.folder), parameters_in(whole.folder))
        assert found.rounds["epsilon"].iloc[-1] > whole.rounds["epsilon"].iloc[-1]
    else:
        assert_same_run(found, whole)


def test_a_disk_that_is_full_in_the_middle_of_a_file(run_tiny, tmp_path):
    """Every file, the log among them, may grow by no byte more; the kernel itself refuses."""
    whole = run_tiny(ROUNDS, output="whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    broken = tmp_path / "broken"

    def fill():
        largest = max(file.stat().st_size for file in broken.rglob("*") if file.is_file())
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, before[1]))

    try:
        with pytest.raises(RunError, match="cannot write"):
            run_tiny(ROUNDS, output="broken", callbacks=[After(2, fill)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file.name for file in broken.rglob(".*")] == [".lock"]  # no temporary files
    assert_same_run(runner.resume(broken), whole)


@pytest.mark.parametrize("seconds", [-10 * 365 * 86400, 10 * 365 * 86400])
def test_a_clock_that_jumps_changes_no_result(run_tiny, monkeypatch, seconds):
    whole = run_tiny(ROUNDS, output="whole")
    real = time.time

    def jump():
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    found = run_tiny(ROUNDS, output="jumped", callbacks=[After(2, jump)])
    assert_same_run(found, whole)
    assert (RunFolder(found.folder).timings()["seconds"] >= 0).all()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("shared_engine")
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_node_that_is_killed_in_a_round_ends_a_run_that_can_be_resumed(
    run_tiny, tmp_path, monkeypatch, system
):
    """As the kernel does when memory is short: while its node works on the third round."""
    import ray

    given = ("engine.name=ray", "engine.nodes=2", ROUNDS, *SYSTEMS[system])
    whole = run_tiny(*given, output="whole")
    submit = RayGrid._submit

    def submit_and_kill(grid, batch):
        if not batch[0].content.config_records or (
            batch[0].content["config"].get("server-round"),
            batch[0].metadata.message_type,
        ) != (3, "train"):
            submit(grid, batch)
            return
        process = ray.get(pids[id(grid.actors()[1])])
        os.kill(process, signal.SIGSTOP)  # it may have answered otherwise
        submit(grid, batch)
        os.kill(process, signal.SIGKILL)

    pids = {}
    started = RayGrid.send_and_receive

    def ask_for_pids(grid, messages, *, timeout=None):
        for actor in grid.actors().values():
            pids.setdefault(id(actor), actor.__ray_call__.remote(lambda node: os.getpid()))
        return started(grid, messages, timeout=timeout)

    monkeypatch.setattr(RayGrid, "_submit", submit_and_kill)
    monkeypatch.setattr(RayGrid, "send_and_receive", ask_for_pids)
    with pytest.raises(ClientError, match="1 of 2 nodes failed") as error:
        run_tiny(*given, output="broken")
    assert "the process of this node was killed" in error.value.text()
    assert "fedrec resume" in error.value.text()
    monkeypatch.undo()
    # its sum was never made, so the round is charged once
    assert_same_run(runner.resume(tmp_path / "broken"), whole)


def test_the_error_of_a_process_that_ray_ends_for_memory_names_the_cause():
    from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

    text = _reason_of(OutOfMemoryError("Task was killed due to the node running low on memory."))
    assert "was killed" in text and "running low on memory" in text and "engine.nodes" in text
    assert "was killed" in _reason_of(ActorDiedError())
    own = ActorDiedError(RayTaskError("f", "a plug-in's error", ValueError("x"), actor_id="0" * 32))
    assert "was killed" not in _reason_of(own) and "a plug-in's error" in _reason_of(own)


def test_an_object_store_that_refuses_itself_is_an_error_with_a_fix(monkeypatch):
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError

    for kind in (ObjectStoreFullError, OutOfDiskError):

        def refuse(value, kind=kind):
            raise kind("it is full")

        monkeypatch.setattr("ray.put", refuse)
        with pytest.raises(EngineError, match="too small for the data") as error:
            _stored(b"x")
        assert kind.__name__ in error.value.text()
