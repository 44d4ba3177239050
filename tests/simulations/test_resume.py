# SPDX-License-Identifier: Apache-2.0
"""A run that is killed or interrupted in the middle of a round ends like an uninterrupted one."""

import multiprocessing
import os
import signal
import time

import pytest

from fedrec.runs.folder import RunFolder
from simulations import runner
from tests.runs import assert_same_run

FORK = multiprocessing.get_context("fork")  # which need not import everything once more
STEP = """
import json, os, pathlib, time
from clients.steps.sgd import Sgd

calls = 0


class Stuck(Sgd):
    '''Trains like `Sgd`, but waits for ever at the third client after round 2 of the run that
    STUCK_IN names.'''

    def batches(self, data, random):
        global calls
        run = os.environ.get("STUCK_IN")
        if run and json.loads((pathlib.Path(run) / "status.json").read_text())["round"] == 2:
            calls += 1
            if calls == 3:
                (pathlib.Path(run).parent / "stuck").touch()
                time.sleep(600)
        return super().batches(data, random)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A folder with the module `stuck_step`."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "stuck_step.py").write_text(STEP)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def table(plugin, tiny_experiment):
    """Every client has a private output layer, so the private state must survive as well."""
    table = {**tiny_experiment(), "rounds": 4}
    table["sampler"]["cohort"] = 12
    table["engine"]["path"] = (
        "reference"  # so that the step is called for one client after the other
    )
    table["step"] |= {"name": "stuck_step:Stuck", "private-parameters": ["layer1.*"]}
    return table


@pytest.fixture(scope="module")
def unbroken(table, tmp_path_factory):
    return runner.run(table, output=tmp_path_factory.mktemp("unbroken") / "run")


def stuck_process(table, run):
    """A process in the middle of round 3 of the run."""
    process = FORK.Process(target=stuck, args=(table, run))
    process.start()
    deadline = time.monotonic() + 60
    while not (run.parent / "stuck").exists():
        assert process.is_alive() and time.monotonic() < deadline, "the run did not come to round 3"
        time.sleep(0.05)
    return process


def stuck(table, run):
    os.environ["STUCK_IN"] = str(run)
    runner.run(table, output=run)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("sign", "status"),
    [(signal.SIGKILL, "running"), (signal.SIGINT, "interrupted")],
    ids=["kill -9", "ctrl-c"],
)
def test_a_broken_run_ends_with_the_numbers_of_an_unbroken_one(
    table, unbroken, tmp_path, sign, status
):
    run = tmp_path / "run"
    process = stuck_process(table, run)
    try:
        os.kill(process.pid, sign)
        process.join(30)
        assert process.exitcode not in (0, None)
    finally:
        process.kill()
        process.join()
    assert RunFolder(run).status() == {"state": status, "round": 2}
    result = runner.resume(run)
    assert RunFolder(run).status() == {"state": "finished", "round": 4}
    assert_same_run(result, unbroken)
    assert result.metrics == unbroken.metrics
