# SPDX-License-Identifier: Apache-2.0
"""Names of contestants lead to modules and environments."""

import importlib.util
import sys

import pytest

from benchmarks.contestants.commands import command, commands


@pytest.mark.parametrize("name", commands("work.npz", 2, 3))
def test_every_contestant_is_a_module_with_the_work_as_its_first_argument(name):
    _, arguments = commands("work.npz", 2, 3)[name]
    place = max(at for at, word in enumerate(arguments) if word == "-m") + 1
    assert importlib.util.find_spec(arguments[place]) is not None
    assert arguments[place + 1] == "work.npz"


def test_fedrecs_own_environment_is_the_running_python():
    assert command("loop", "work.npz", 2, 3)[0] == sys.executable


def test_environments_are_looked_up_where_the_variable_points(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDREC_BENCHMARK_VENVS", str(tmp_path))
    with pytest.raises(SystemExit, match="make benchmark-venvs"):
        command("pfl", "work.npz", 2, 3)
    (tmp_path / "pfl" / "bin").mkdir(parents=True)
    (tmp_path / "pfl" / "bin" / "python").touch()
    assert command("pfl", "work.npz", 2, 3)[0] == str(tmp_path / "pfl" / "bin" / "python")


def test_unknown_contestants_are_refused_with_the_known_ones():
    with pytest.raises(SystemExit, match=r"'flour'.*flower"):
        command("flour", "work.npz", 2, 3)
