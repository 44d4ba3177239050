# SPDX-License-Identifier: Apache-2.0
"""The packages under examples/ install with pip, are listed by their entry points, and their
READMEs are correct."""

import importlib
import tomllib
from pathlib import Path

import pytest

from fedrec.components import registry
from fedrec.experiment.loading import load
from tests.simulations.bundles import install

pytestmark = pytest.mark.install

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the examples as pip installs them; built from copies, as building leaves files
    behind."""
    import shutil

    folder = tmp_path_factory.mktemp("examples")
    copies = [shutil.copytree(path, folder / path.name) for path in EXAMPLES]
    install(folder / "site", copies)
    return folder / "site"


def test_there_are_three():
    assert [path.name for path in EXAMPLES] == ["csv-dataset", "geometric-median", "pfedrec"]


@pytest.mark.slow
def test_their_components_are_found_by_name(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    declared = {}
    for path in EXAMPLES:
        for group, names in tomllib.loads((path / "pyproject.toml").read_text())["project"][
            "entry-points"
        ].items():
            declared |= {
                (group.removeprefix("fedrec."), name): target for name, target in names.items()
            }
    assert len(declared) == 6
    kinds = {kind.name: kind for kind in registry.KINDS}
    for (kind, name), target in declared.items():
        found = dict(registry.available(kinds[kind]))[name]
        assert f"{found.__module__}:{found.__qualname__}" == target


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_each_has_an_experiment_that_loads_and_a_readme_that_names_it(path):
    assert load(path / "experiment.toml").name in ("geometric-median", "listening-log", "pfedrec")
    readme = (path / "README.md").read_text(encoding="utf-8")
    assert "experiment.toml" in readme and "pip install" in readme and "pytest" in readme
