# SPDX-License-Identifier: Apache-2.0
"""`fedrec new`: a package of each kind is written, installed with pip, listed, run, and passes its
contract."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from fedrec.components.registry import KINDS
from fedrec.experiment.schema import SECTIONS
from fedrec.runs.folder import RunFolder
from tests.simulations.bundles import ROOT, flwr_run, install

pytestmark = [pytest.mark.install, pytest.mark.slow]

NAMES = {kind.name: f"trial-{kind.name}" for kind in KINDS}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A package of each kind, as written by `fedrec new`, and all of them installed in the folder
    `site`."""
    from simulations.scaffold.package import write_package

    folder = tmp_path_factory.mktemp("packages")
    written = [str(write_package(kind, name, folder)) for kind, name in NAMES.items()]
    install(folder / "site", written)
    return folder


@pytest.fixture
def installed(packages, monkeypatch):
    """The packages can be imported and their entry points are found."""
    monkeypatch.syspath_prepend(str(packages / "site"))
    importlib.invalidate_caches()
    return packages


def test_each_appears_in_the_list_by_its_entry_point(installed, fedrec):
    code, out, _ = fedrec("list", "--json")
    found = json.loads(out)
    for kind, name in NAMES.items():
        (entry,) = [entry for entry in found[kind] if entry["name"] == name]
        assert entry["file"] == str(installed / "site" / name.replace("-", "_") / f"{kind}.py")
        assert entry["about"] and not entry["about"].startswith("BROKEN")
    assert code == 0


@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind != "attack"])
def test_its_experiment_runs(kind, installed, fedrec, tmp_path):
    name = NAMES[kind]
    quick = ["rounds=2", "evaluation.users=4", "evaluation.final-users=4"]
    if kind != "mechanism":  # whose rounds are of all clients
        quick += ["sampler.cohort=3"]
    small = [] if kind == "dataset" else ["dataset.users=24", "dataset.items=30"]
    file = installed / name / f"{name}.toml"
    code, out, err = fedrec("run", file, "-o", tmp_path / "run", sets=[*quick, *small])
    assert code == 0, err
    text = (tmp_path / "run" / "experiment.toml").read_text()
    assert f'"{name}"' in text
    assert kind != "baseline" or name in out


def test_its_attack_runs(installed, fedrec, tmp_path):
    name = NAMES["attack"]
    file, quick = installed / name / f"{name}.toml", ["rounds=2", "dataset.users=40"]
    arguments = ["attack", "run", name, file, "-w", "length=5", "-o", tmp_path / "a", "--json"]
    code, out, err = fedrec(*arguments, sets=[*quick, "sampler.cohort=3"])
    assert code == 0, err
    found = json.loads(out)
    assert found["attack"] == name
    assert found["options"]["length"] == 5
    assert 0 <= found["success"]["auc"]["value"] <= 1


def test_its_name_may_be_a_module_and_a_class(installed, fedrec, tmp_path):
    file = installed / NAMES["strategy"] / f"{NAMES['strategy']}.toml"
    path = "trial_strategy.strategy:TrialStrategy"
    sets = [f"strategy.name={path}", "rounds=1", "evaluation.final-users=2"]
    code, _, err = fedrec("run", file, "-o", tmp_path / "run", sets=sets)
    assert code == 0, err
    assert RunFolder(tmp_path / "run").experiment.strategy.name == path


def test_each_keeps_its_own_contract(packages):
    """With the tests written by `fedrec new`, in a separate process."""
    environment = {**os.environ, "PYTHONPATH": f"{packages / 'site'}:{ROOT}"}
    tests = [str(packages / name / "tests") for name in NAMES.values()]
    flags = ["-q", "-p", "no:cacheprovider", "--rootdir", str(packages)]
    command = [sys.executable, "-m", "pytest", *flags, *tests]
    done = subprocess.run(command, env=environment, cwd=packages, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " failed" not in done.stdout and "passed" in done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 60


@pytest.mark.timeout(240)
def test_flwr_run_takes_the_plug_in_along_in_the_bundle(installed, tmp_path):
    """The package is installed for this process only: Flower's processes get it from the app
    bundle."""
    app = installed / NAMES["strategy"]
    overrides = "strategy.name=trial_strategy.strategy:TrialStrategy;rounds=2"
    overrides += ";evaluation.final-users=4;dataset.users=24;dataset.items=30"
    overrides += ";sampler.cohort=3;engine.threads=1;engine.device=cpu"
    config = f"experiment='{app / f'{app.name}.toml'}' overrides='{overrides}'"
    run = flwr_run(app, tmp_path, config)
    assert run.experiment.strategy.name == "trial_strategy.strategy:TrialStrategy"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["strategi", "mine"], ["unknown kind", "did you mean 'strategy'?"]),
        (["strategy", "Mine"], ["not a valid name of a package", "lower-case"]),
        (["strategy", "my--idea"], ["not a valid name of a package"]),
        (["strategy", "class"], ["not a valid name of a package", "word of Python"]),
        (["strategy", "reptile"], ["is taken", "built-in"]),
        (["strategy", "numpy"], ["is taken", "imported already"]),
        (["strategy", "a" * 33], ["not a valid name of a package", "at most 32"]),
    ],
)
def test_the_error_for_a_bad_name_states_the_reason(arguments, words, fedrec, tmp_path):
    code, _, err = fedrec("new", *arguments, "--into", tmp_path)
    assert code == 2 and all(word in err for word in words), err
    assert not any(tmp_path.iterdir())


def test_a_package_is_not_overwritten(fedrec, tmp_path):
    assert fedrec("new", "sampler", "in-turn", "--into", tmp_path)[0] == 0
    code, _, err = fedrec("new", "step", "in-turn", "--into", tmp_path)
    assert code == 2 and "exists already" in err


def test_every_kind_that_has_a_section_is_known_to_the_readme(packages):
    for kind, name in NAMES.items():
        readme = (packages / name / "README.md").read_text()
        assert ("flwr run" in readme) == (kind in {one.name for one in SECTIONS})
        assert "{" not in readme
