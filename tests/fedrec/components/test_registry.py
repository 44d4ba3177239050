# SPDX-License-Identifier: Apache-2.0
"""Components by name: built-in files, dotted paths, entry points; one broken plug-in does not stop
the others."""

import sys
from importlib.metadata import EntryPoint

import pytest

from clients.steps.sgd import Sgd
from fedrec.components import registry
from fedrec.components.registry import (
    KINDS,
    STEP,
    STRATEGY,
    Kind,
    available,
    available_names,
    builtin_names,
    resolve,
)
from fedrec.errors import ExperimentError
from strategies.fedavg import FedAvg


@pytest.fixture
def plugins(monkeypatch, tmp_path):
    """A module of plug-ins on the path, and entry points for it."""
    (tmp_path / "outside_step.py").write_text(
        "from clients.steps.sgd import Sgd\nclass Mine(Sgd):\n    pass\nNOT_A_CLASS = 3\n"
    )
    (tmp_path / "broken_step.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [
        EntryPoint("mine", "outside_step:Mine", "fedrec.step"),
        EntryPoint("broken", "broken_step:Step", "fedrec.step"),
    ]
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group: [entry for entry in entries if entry.group == group],
        raising=True,
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_built_in_resolves_to_a_class_of_its_own_file(kind):
    for name in builtin_names(kind):
        found = resolve(kind, name)
        home, _, file = found.__module__.rpartition(".")
        assert home == kind.home or home.startswith(f"{kind.home}.")
        assert found.name == name if kind.named else file == name.replace("-", "_")


def test_built_ins_are_the_public_files_without_the_contract():
    assert "sgd" in builtin_names(STEP) and "fixed-size" in builtin_names(registry.SAMPLER)
    assert not {"base", "-planted", "evaluate"} & {
        name for kind in KINDS for name in builtin_names(kind)
    }


def test_dotted_path():
    assert resolve(STRATEGY, "strategies.fedavg:FedAvg") is FedAvg
    assert resolve(STRATEGY, "flwr.serverapp.strategy:FedAdam").__name__ == "FedAdam"


def test_entry_point(plugins):
    mine = resolve(STEP, "mine")
    assert mine.__name__ == "Mine" and issubclass(mine, Sgd)
    assert available_names(STEP) == sorted({*builtin_names(STEP), "mine", "broken"})


def test_a_broken_plug_in_is_named_and_the_rest_works(plugins):
    found = dict(available(STEP))
    assert found["sgd"] is Sgd and found["mine"].__name__ == "Mine"
    error = found["broken"]
    assert isinstance(error, ExperimentError) and "'broken_step'" in error.problem
    assert error.got == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"


@pytest.mark.parametrize(
    ("name", "problem", "got"),
    [
        ("outside_step:Yours", "'outside_step:Yours' is not a step", "no such name"),
        ("outside_step:NOT_A_CLASS", "is not a step", "3"),
        ("strategies.fedavg:FedAvg", "is not a step", "FedAvg"),
        ("nowhere_at_all:Step", "cannot import 'nowhere_at_all'", "ModuleNotFoundError"),
        (":Step", "cannot import ''", "ValueError"),
    ],
)
def test_a_path_that_leads_nowhere_is_explained(plugins, name, problem, got):
    with pytest.raises(ExperimentError) as caught:
        resolve(STEP, name)
    assert problem in caught.value.problem and got in caught.value.got


def test_a_module_of_the_working_directory_is_offered_by_pythonpath(monkeypatch, tmp_path):
    (tmp_path / "module_in_this_folder.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry not in ("", ".")])
    with pytest.raises(ExperimentError) as found:
        resolve(STRATEGY, "module_in_this_folder:Own")
    assert "PYTHONPATH=." in found.value.text()


def test_an_unknown_name_is_answered_with_built_ins_and_plug_ins(plugins):
    with pytest.raises(ExperimentError) as caught:
        resolve(STEP, "mien")
    assert caught.value.fix == "did you mean 'mine'?"


def test_a_file_with_two_components_is_refused(monkeypatch, tmp_path):
    home = tmp_path / "homes_of_two"
    home.mkdir()
    (home / "__init__.py").touch()
    (home / "both.py").write_text(
        "from clients.steps.sgd import Sgd\nclass A(Sgd): pass\nclass B(Sgd): pass\nclass _C(Sgd):"
        " pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ExperimentError, match="exactly one step") as caught:
        resolve(Kind("step", "homes_of_two", STEP.base), "both")
    assert caught.value.got == "A, B"
