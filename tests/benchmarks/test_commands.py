# SPDX-License-Identifier: Apache-2.0
"""Names of contestants resolve to modules and environments."""

import importlib.util
import sys

import pytest

from benchmarks.contestants.commands import Task, command, commands

TASK = Task("work.npz", 2, 3)


@pytest.mark.parametrize("name", commands(TASK))
def test_every_contestant_is_a_module_with_the_work_as_its_first_argument(name):
    _, arguments = commands(TASK)[name]
    place = max(at for at, word in enumerate(arguments) if word == "-m") + 1
    assert importlib.util.find_spec(arguments[place]) is not None
    assert arguments[place + 1] == "work.npz"


def test_fedrecs_own_environment_is_the_running_python():
    assert command("loop", TASK)[0] == sys.executable


def test_environments_are_looked_up_where_the_variable_points(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDREC_BENCHMARK_VENVS", str(tmp_path))
    with pytest.raises(SystemExit, match="make benchmark-venvs"):
        command("pfl", TASK)
    (tmp_path / "pfl" / "bin").mkdir(parents=True)
    (tmp_path / "pfl" / "bin" / "python").touch()
    assert command("pfl", TASK)[0] == str(tmp_path / "pfl" / "bin" / "python")


def test_unknown_contestants_are_refused_with_the_known_ones():
    with pytest.raises(SystemExit, match=r"'flour'.*flower"):
        command("flour", TASK)


def test_a_gpu_is_asked_of_those_who_can_use_it():
    task = Task("work.npz", 2, 3, "cuda", 8.0)
    assert command("fedrec", task)[-3:] == ["ray", "cuda", "8.0"]
    assert command("loop", task)[-1] == "cuda"
    with pytest.raises(SystemExit, match="'pfl' on cuda"):
        command("pfl", task)
