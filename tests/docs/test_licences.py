# SPDX-License-Identifier: Apache-2.0
"""The table of licences of a release."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "licences.py"


def told(tmp_path, *packages):
    """The table of a bill of packages with licences in the form of CycloneDX, and the errors."""
    bill = {"components": [{"name": n, "version": "1", "licenses": own} for n, own in packages]}
    (tmp_path / "sbom.json").write_text(json.dumps(bill))
    command = [sys.executable, SCRIPT, tmp_path / "sbom.json", tmp_path / "table.csv"]
    done = subprocess.run(command, capture_output=True, text=True)
    return (tmp_path / "table.csv").read_text().splitlines(), done.stderr, done.returncode


def named(*names):
    return [{"license": {"name": name}} for name in names]


def test_every_package_has_a_line(tmp_path):
    table, errors, code = told(
        tmp_path,
        ("one", [{"license": {"id": "MIT"}}]),
        ("ray", []),
        ("other", [{"expression": "Apache-2.0 OR BSD-3-Clause"}]),
        ("tables", named("License :: OSI Approved :: BSD License", "BSD License")),
    )
    assert (errors, code) == ("", 0)
    assert table == [
        "package,version,licence",
        "one,1,MIT",
        "other,1,Apache-2.0 OR BSD-3-Clause",
        "ray,1,Apache-2.0",
        "tables,1,BSD License",
    ]


@pytest.mark.parametrize(
    ("licences", "refused"),
    [
        (named("GPL-3.0-only"), True),
        (named("License :: OSI Approved :: GNU General Public License v3 (GPLv3)"), True),
        ([{"expression": "AGPL-3.0-or-later"}], True),
        ([{"expression": "GPL-2.0-only OR MIT"}], False),
        (named("LGPL-3.0-only"), False),
        (named("GNU Lesser General Public License v3 or later (LGPLv3+)"), False),
        ([], True),
    ],
)
def test_a_licence_that_would_extend_to_fedrec_ends_the_release(tmp_path, licences, refused):
    table, errors, code = told(tmp_path, ("fine", named("MIT")), ("odd", licences))
    assert len(table) == 3 and bool(code) == refused
    assert ("odd has" in errors) == refused and "fine" not in errors
