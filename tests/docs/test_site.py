# SPDX-License-Identifier: Apache-2.0
"""The documentation site builds without warnings, and its reference has every public name."""

import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedrec
from fedrec.components.registry import METRIC, available_names
from simulations import runner

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "\n".join(
    page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
)
ENTRIES = re.findall(r"^::: ([\w.]+)$", REFERENCE, re.M)
PLUGINS = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
OURS = r"(?:fedrec|clients|server|strategies|simulations)"


def of_plugins() -> set[str]:
    """Names that docs/plugins.md imports in its examples, and dotted names of classes in its
    text."""
    imports = re.findall(rf"^from ({OURS}[\w.]+) import (.+)$", PLUGINS, re.M)
    names = {f"{module}.{name.strip()}" for module, found in imports for name in found.split(",")}
    return names | set(re.findall(rf"`({OURS}(?:\.\w+)+\.[A-Z]\w+)`", PLUGINS))


def has_entry(name: str) -> bool:
    """Whether an object or its module is on a page."""
    return name in ENTRIES or name.rpartition(".")[0] in ENTRIES


def test_every_entry_exists():
    assert len(ENTRIES) > 50 and len(set(ENTRIES)) == len(ENTRIES)
    for entry in ENTRIES:
        assert pkgutil.resolve_name(entry) is not None


def test_every_public_name_has_an_entry():
    headings = re.findall(r'heading: "fedrec\.(\w+)"', REFERENCE)
    assert sorted(headings) == sorted(fedrec.__all__)
    assert {pkgutil.resolve_name(entry) for entry in ENTRIES} >= {
        getattr(fedrec, name) for name in fedrec.__all__
    }


def test_every_name_of_the_page_on_plug_ins_has_an_entry():
    names = {name for name in of_plugins() if not name.startswith("fedrec.errors.")}
    assert len(names) > 40 and "strategies.dp.DpFedAvg" in names
    assert [name for name in sorted(names) if not has_entry(name)] == []


def test_the_columns_of_a_result_are_on_the_page(tiny_experiment, tmp_path):
    private = {
        "sampler": {"name": "fixed-size", "cohort": 4},
        "privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0},
        "early-stopping": {},
        "split": {"name": "user-holdout", "validation-users": 0.2},
    }
    result = runner.run({**tiny_experiment(), **private}, output=tmp_path / "run")
    table = REFERENCE.split("## Columns of a result")[1]
    named = set(re.findall(r"`([\w-]+)`", table))
    metrics = available_names(METRIC)
    columns = {str(name).partition("@")[0] for name in result.rounds} - set(metrics)
    own = {name for name in columns if not name.startswith("validation-")}
    assert {"round", "epsilon"} < own <= named and columns > own
    assert {result.users.index.name, result.groups.index.name, result.gaps.index.name} <= named


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    page = (tmp_path / "reference" / "fedrec.html").read_text(encoding="utf-8")
    assert "runs/" in page and 'id="simulations.runner.run"' in page
    assert (tmp_path / "changelog.html").exists()
