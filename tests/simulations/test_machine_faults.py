# SPDX-License-Identifier: Apache-2.0
"""A disk that is full or read-only, and a clock that jumps: a clear error, and a run that goes on
to the same bits."""

import errno
import os
import resource
import time

import pytest

from fedrec.errors import RunError
from fedrec.runs.folder import RunFolder
from fedrec.runtime import atomic_files
from server.callbacks.base import Callback
from simulations import runner
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

        monkeypatch.setattr(atomic_files, "_beside", refuse)

    return begin


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
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
    found = runner.resume(tmp_path / "broken")
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


@pytest.mark.parametrize("seconds", [-10 * 365 * 86400, -1.5, 10 * 365 * 86400])
def test_a_clock_that_jumps_changes_no_result(run_tiny, monkeypatch, seconds):
    whole = run_tiny(ROUNDS, output="whole")
    real = time.time

    def jump():
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    found = run_tiny(ROUNDS, output="jumped", callbacks=[After(2, jump)])
    assert_same_run(found, whole)
    assert (RunFolder(found.folder).timings()["seconds"] >= 0).all()
