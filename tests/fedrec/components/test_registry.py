# SPDX-License-Identifier: Apache-2.0
"""Components by name: built-in classes, dotted paths, entry points; one broken plug-in does not
stop the others."""

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
    described,
    file_of,
    ours,
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
def test_every_built_in_resolves_to_the_class_with_its_name(kind):
    assert builtin_names(kind)
    for name in builtin_names(kind):
        found = resolve(kind, name)
        assert vars(found)["name"] == name and ours(kind, found)


def test_bases_and_helpers_are_no_built_ins():
    assert "sgd" in builtin_names(STEP) and "fixed-size" in builtin_names(registry.SAMPLER)
    names = {name for kind in KINDS for name in builtin_names(kind)}
    assert not {"base", "descent", "optimiser", "evaluate", ""} & names


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


TWO = '''"""Two steps.

class Told:
    name = "in-a-docstring"
"""

from dataclasses import dataclass

from clients.steps.sgd import Sgd

name = "of-the-module"


@dataclass
class Row:
    """A class with a field of this name."""

    name: str = "a-field"


class First(Sgd):
    """The first step.

    name = "in-a-docstring-of-a-class"
    """

    name = "first"


class Second(First):
    """The second step."""

    def label(self) -> str:
        name = "a-variable"
        return name

    name = "second"


class Heir(Second):
    """It has the name of another class only."""


def build() -> str:
    """Another variable."""
    name = "a-variable-of-a-function"
    return name
'''


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A function that writes the modules of a package, given as path and source, and returns its
    kind of steps."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path.name  # of each test another, as the names of a home are read once

    def write(sources, home=""):
        for path, source in sources.items():
            file = tmp_path / package / path
            file.parent.mkdir(parents=True, exist_ok=True)
            for folder in {file.parent, tmp_path / package}:
                (folder / "__init__.py").touch()
            file.write_text(source)
        return Kind("step", package + home, STEP.base)

    yield write
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        del sys.modules[module]


@pytest.mark.parametrize(
    ("path", "inside"),
    [("both.py", ""), ("both.py", ".both"), ("below/both.py", ""), ("below/both.py", ".below")],
)
def test_the_components_of_a_module_are_its_classes_with_a_name(home, path, inside):
    kind = home({path: TWO}, inside)
    module = f"{kind.home.partition('.')[0]}.{path.removesuffix('.py').replace('/', '.')}"
    assert builtin_names(kind) == ["first", "second"] and module not in sys.modules
    assert described(kind, "second") == "The second step." and module not in sys.modules
    assert file_of(kind, "first").endswith(path)
    for name in ("first", "second"):
        found = resolve(kind, name)
        assert found.__name__.lower() == name and found.__module__ == module and ours(kind, found)


def test_a_class_without_a_name_is_no_component_but_a_plug_in(home):
    kind = home({"steps.py": "from clients.steps.sgd import Sgd\n\n\nclass Mine(Sgd):\n    pass\n"})
    assert builtin_names(kind) == []
    with pytest.raises(ExperimentError, match="unknown step 'sgd'"):
        resolve(kind, "sgd")
    assert resolve(STEP, f"{kind.home}.steps:Mine").__name__ == "Mine"


def test_one_name_in_two_modules_is_refused(home):
    kind = home({"one.py": TWO, "two.py": TWO.replace('"first"', '"third"')})
    with pytest.raises(ExperimentError, match=r"two classes .* step 'second'") as caught:
        builtin_names(kind)
    assert caught.value.got == f"one in {kind.home}.one, another in {kind.home}.two"


def test_a_named_class_of_another_base_is_refused(home):
    kind = home({"steps.py": 'class Alone:\n    name = "alone"\n'})
    with pytest.raises(ExperimentError, match="does not define the step 'alone'") as caught:
        resolve(kind, "alone")
    assert caught.value.got == "the class Alone of another base"
    assert caught.value.fix == "derive the class from Step, or take its `name` away"
