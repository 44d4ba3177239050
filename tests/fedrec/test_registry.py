# SPDX-License-Identifier: Apache-2.0
"""Components are found by name, and contracts refuse what breaks them.

Every built-in passes the contract of its kind. New built-ins are found automatically.

`NEEDS` has the settings, or other sections of the experiment, without which a built-in cannot run.
"""

import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from fedrec import testing
from fedrec.components import registry
from fedrec.components.registry import (
    DATASET,
    KINDS,
    STEP,
    STRATEGY,
    Kind,
    builtin_names,
    ours,
    resolve,
)
from fedrec.data.reader import data_directory
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import TARGET_METRICS, TARGET_RATINGS
from fedrec.privacy.accounting.sampling import Scheduled
from simulations.contracts.base import SMALL, RunContract
from tests.component_checks import CHECKS


@pytest.fixture
def plugins(monkeypatch, tmp_path):
    """A module of plug-ins on the path, and entry points for it."""
    (tmp_path / "outside_step.py").write_text(
        "from clients.steps.sgd import Sgd\nclass Mine(Sgd):\n    pass\nNOT_A_CLASS = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = EntryPoint("mine", "outside_step:Mine", "fedrec.step")
    found = lambda group: [mine] if group == mine.group else []  # noqa: E731
    monkeypatch.setattr(registry, "entry_points", found)


@pytest.mark.parametrize(
    ("name", "problem", "got"),
    [
        ("outside_step:Yours", "'outside_step:Yours' is not a step", "no such name"),
        ("outside_step:NOT_A_CLASS", "is not a step", "3"),
        ("strategies.sums:FedAvg", "is not a step", "FedAvg"),
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
    with pytest.raises(ExperimentError, match=r"duplicate step name 'second'") as caught:
        builtin_names(kind)
    assert caught.value.got == f"{kind.home}.one:Second and {kind.home}.two:Second"


def test_a_named_class_of_another_base_is_refused(home):
    kind = home({"steps.py": 'class Alone:\n    name = "alone"\n'})
    with pytest.raises(ExperimentError, match=r"steps:Alone' is not a step") as caught:
        resolve(kind, "alone")
    assert "Alone derives from Step" in caught.value.fix


VAE = {"model": {"name": "vae", "hidden": 6, "latent": 3}}
COHORT = {"settings": {"cohort": 6}}
PRIVATE = {"privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0}}
STAGES = {
    "stage-one": {"rounds": 1, "step": {"name": "sgd", "epochs": 1}},
    "main": {"name": "reptile"},
}
SCHEDULED = {
    "schedule": Scheduled(3, 4),
    "experiment": {"sampler": {"name": "min-separation", "cohort": 3, "separation": 4}},
}
PROFILED = {"model": {**SMALL["model"], "name": "privrec-profile", "item-bias": True}}
BIASED = {"model": {**SMALL["model"], "item-bias": True}}
RATED = {
    "task": "rating",
    "positive-above": None,
    "model": {"name": "pnbm"},
    "step": {"name": "pnbm"},
}
META = {kind: {"name": "metamf"} for kind in ("model", "step", "strategy")} | {
    "split": {"name": "leave-one-out"}
}
GUIDED = {
    "model": {"name": "gpfedrec", "embedding": 4, "hidden": [6]},
    "step": {"name": "gpfedrec"},
    "strategy": {"name": "gpfedrec"},
    "split": {"name": "leave-one-out"},
}
GRAPH = {
    "model": {"name": "fedgnn", "embedding": 4},
    "step": {"name": "fedgnn"},
    "strategy": {"name": "fedgnn", "neighbours": 2, "history": 5},
    "split": {"name": "leave-one-out"},
}
IALS = {"model": {"name": "ials", "factors": 4}, "step": {"name": "als"}}
MOMENTS = {"model": {**IALS["model"], "moments": True}, "step": {"name": "als"}}
LINEAR = {"model": {"name": "item-weights", "items": 12}, "step": {"name": "gram"}}
NEXT = {"step": {"name": "sequence", "rates": {"item.id": 5.0}}, "split": {"name": "leave-one-out"}}
SMALL_SASREC = {"width": 4, "longest": 5, "blocks": 1, "loss": "binary"}
SESSIONS = {"settings": {"epochs": 1, "hidden": 4, "session-length": 6, "masks": 2}}
TARGETS = {"adversary": {"attack": "random", "share": 0.0}}
FACTORS = {
    "model": {"name": "mf", "factors": 4},
    "step": {"name": "sgd", "epochs": 1, "private-parameters": ["user.*"]},
}
SEEDED = ("vae", "ae", "neumf", "gmf", "mlp", "mf", "lightgcn", "bprmf", "warp")
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("baseline", "dpsgd-pnbm"): {"settings": {"minimum-ratings": 2}},
    **{("baseline", name): {"random": True} for name in SEEDED},
    ("model", "ials"): {"settings": {"factors": 4, "moments": True}},
    ("model", "sasrec"): {"settings": SMALL_SASREC, "experiment": NEXT},
    ("model", "gru4rec"): {"settings": {"width": 4, "longest": 5}, "experiment": NEXT},
    ("step", "sequence"): {"experiment": {**NEXT, "model": {"name": "sasrec", **SMALL_SASREC}}},
    ("strategy", "gram-start"): {
        "experiment": {**MOMENTS, "model": {**MOMENTS["model"], "products": True}}
    },
    ("step", "als"): {"experiment": IALS, "random": False},
    ("step", "pfedrec"): {"experiment": {"model": {"name": "pfedrec", "embedding": 4}}},
    ("step", "fedrap"): {"experiment": {"model": {"name": "fedrap", "embedding": 4}}},
    ("step", "sgd-profile"): {"experiment": PROFILED},
    ("step", "gpfedrec"): {"experiment": GUIDED},
    ("strategy", "gpfedrec"): {"experiment": GUIDED},
    ("step", "fedgnn"): {"experiment": GRAPH},
    ("strategy", "fedgnn"): {"experiment": GRAPH},
    ("step", "contrastive"): SESSIONS,
    ("step", "joint"): SESSIONS,
    ("strategy", "fcf"): {"experiment": IALS},
    ("strategy", "fed-als"): {"experiment": MOMENTS},
    ("step", "vae"): {"experiment": VAE},
    ("step", "dpvae"): {"experiment": VAE},
    ("model", "vae"): {"experiment": {"step": {"name": "vae"}}},
    ("model", "ae"): {"experiment": {"step": {"name": "vae"}}},
    ("mechanism", "banded"): {"settings": {"bands": 3}, **SCHEDULED},
    ("sampler", "fixed-size"): COHORT,
    ("sampler", "limited"): {"settings": {"cohort": 6, "participations": 30}},
    ("sampler", "min-separation"): {"settings": {"cohort": 3, "separation": 4}},
    ("sampler", "poisson"): COHORT,
    ("strategy", "two-stage"): {"settings": STAGES},
    ("attack", "audit"): {"settings": {"canaries": 20}, "experiment": PRIVATE},
    ("attack", "attribute"): {"settings": {"folds": 2, "source": "recommendations"}},
    ("attack", "lira"): {"settings": {"shadows": 4}},
    ("attack", "membership"): {
        "settings": {"shadow-users": 8, "judged": 2, "trees": 5},
        "experiment": {"sampler": {"name": "fixed-size", "cohort": 3}},
    },
    ("dataset", "synthetic"): {
        "settings": {"users": 24, "items": 30, "mean-interactions": 8},
        "has_files": False,
    },
    ("split", "leave-one-out"): {"random": False},
    ("split", "global-time"): {"random": False},
    ("split", "published"): {"settings": {"validation": 0.25}},
    ("sampler", "full"): {"random": False},
    ("step", "counts"): {"experiment": BIASED, "random": False},
    ("strategy", "bulyan"): {"experiment": {"sampler": {"name": "fixed-size", "cohort": 8}}},
    ("strategy", "popularity-start"): {"experiment": BIASED},
    **{("metric", name): {"experiment": TARGETS} for name in (*TARGET_METRICS, *TARGET_RATINGS)},
    ("poisoning", "fedrec-attack"): {"experiment": FACTORS},
    ("poisoning", "pieck"): {"experiment": FACTORS},
    ("poisoning", "product-boosting"): {"experiment": {**LINEAR, "strategy": {"name": "gram"}}},
    ("perturbation", "randomised-response"): {"settings": {"epsilon": 2.0}},
    ("perturbation", "noisy-cooccurrence"): {
        "settings": {"epsilon": 20.0},
        "experiment": {"positive-above": None},
    },
    ("perturbation", "upc-sdg"): {
        "settings": {"embeddings": {"epochs": 3}, "generator": {"steps": 3}}
    },
    ("perturbation", "targeted"): {"settings": {"attribute": "gender", "epsilon": 1.0}},
    ("strategy", "means-start"): {"experiment": RATED},
    ("model", "pnbm"): {"experiment": RATED, "settings": {"items": 12, "rank": 2}},
    ("step", "pnbm"): {"experiment": RATED, "random": False},
    ("step", "rating-sums"): {"experiment": RATED, "random": False},
    ("model", "metamf"): {"experiment": META},
    ("step", "metamf"): {"experiment": META},
    ("strategy", "metamf"): {"experiment": META},
}
# Models from sums of users' products, with their settings, step and strategy.
for model, settings, step in (
    ("fold-in", {"items": 12, "factors": 4}, {"name": "gram", "low-rated": 0.3}),
    ("content-map", {"items": 12, "factors": 4}, {"name": "gram"}),
    ("transitions", {"items": 12, "window": 3}, {"name": "transitions"}),
    ("item-weights", {"items": 12}, {"name": "gram"}),
):
    strategy = {"name": "gram" if model == "item-weights" else model}
    parts = {"model": {"name": model, **settings}, "step": step, "strategy": strategy}
    NEEDS["model", model] = {"settings": settings, "experiment": parts, "random": False}
    NEEDS["step", step["name"]] = {"experiment": parts, "random": False}
    NEEDS["strategy", strategy["name"]] = {"experiment": {"model": parts["model"], "step": step}}
# Their clients start from parameters that the server generates and send gradients of these, so the
# contracts of a model and of a step do not apply; whole runs are tested.
IN_RUNS_ALONE = {("model", "metamf"), ("step", "metamf"), ("step", "gpfedrec"), ("step", "fedgnn")}
LARGEST = 80 << 20  # bytes of raw data that are read here; larger datasets have tests of their own


class Written:
    """A table that a test writes before it reads it."""

    @pytest.fixture(autouse=True)
    def write(self, tmp_path_factory):
        file = tmp_path_factory.mktemp("table") / "table.csv"
        rows = [f"u{user},i{(user * item) % 13}" for user in range(24) for item in range(1, 9)]
        file.write_text("user,item\n" + "\n".join(dict.fromkeys(rows)) + "\n")
        type(self).settings = {"path": str(file)}


class TwoFiles:
    """A dataset that its publisher has split, written before it is read."""

    @pytest.fixture(autouse=True)
    def write(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("published")
        for name, items in (("train", range(8)), ("test", range(8, 11))):
            rows = [
                f"{user} {' '.join(str((7 * item + user) % 30) for item in items)}"
                for user in range(24)
            ]
            (folder / f"{name}.txt").write_text("\n".join(rows) + "\n")
        dataset = {"name": "gowalla", "path": str(folder), "verify": False}
        type(self).experiment = {"dataset": dataset, "positive-above": None}


SLOW = {("callback", "mlflow"), ("mechanism", "banded"), ("perturbation", "noisy-cooccurrence")}
WRITTEN = {("dataset", "table"): Written, ("split", "published"): TwoFiles}


def built_ins():
    for kind in KINDS:
        contract = CHECKS.get(kind.name) or getattr(testing, f"{kind.name.capitalize()}Contract")
        for name in builtin_names(kind):
            yield kind, name, contract


def marked(kind, name, cls):
    """Datasets of raw data are read if these are available and not too large."""
    if (kind.name, name) in SLOW:
        return pytest.mark.slow(cls)
    if kind is not DATASET or resolve(kind, name).source is None:
        return cls
    folder = data_directory() / (resolve(kind, name).source.folder or name)
    size = (
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if folder.is_dir()
        else 0
    )
    there = pytest.mark.skipif(not 0 < size <= LARGEST, reason=f"{size} bytes in {folder}")
    return pytest.mark.real_data(there(cls))


for kind, name, contract in built_ins():
    needs = NEEDS.get((kind.name, name), {})
    title = "Test" + "".join(part.capitalize() for part in f"{kind.name}-{name}".split("-"))
    if (kind.name, name) in IN_RUNS_ALONE:
        contract, needs = RunContract, {**needs, "kind": kind}
    bases = (WRITTEN[kind.name, name], contract) if (kind.name, name) in WRITTEN else (contract,)
    made = type(title, bases, {"component": name, "__module__": __name__, **needs})
    globals()[title] = marked(kind, name, made)
del kind, name, contract, made
