# SPDX-License-Identifier: Apache-2.0
"""What the packages say of themselves to other programs."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_each_package_has_types_for_others():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["fedrec", "clients", "server", "strategies", "simulations"]
    assert all((ROOT / name / "py.typed").is_file() for name in packages)


def test_the_citation_has_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, re.M)[1] == project["version"]
    assert re.search(r"^license: (.+)$", citation, re.M)[1] == project["license"]
