# SPDX-License-Identifier: Apache-2.0
"""Licences of the packages in a software bill of materials (CycloneDX, JSON), as a table.

    python docs/licences.py dist/sbom.json dist/licences.csv

Ends with an error if a package has no licence, or one that would extend to fedrec (GPL, AGPL).
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNDECLARED = {
    "asttokens": "Apache-2.0",
    "dp-accounting": "Apache-2.0",
    "protobuf": "BSD-3-Clause",
    "ray": "Apache-2.0",
}
"""Licences of packages whose metadata have only a text, as their repositories state them."""


def licences(bill: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, version and licences of each package."""
    for package in bill.get("components", []):
        found = [
            entry.get("expression") or entry["license"].get("id") or entry["license"].get("name")
            for entry in package.get("licenses", [])
        ]
        names = [str(name).rpartition(" :: ")[2] for name in found if name]
        known = "; ".join(dict.fromkeys(names)) or UNDECLARED.get(package["name"].lower(), "")
        yield package["name"], package.get("version", ""), known


def problem_of(licence: str) -> str | None:
    """Why a package of these licences may not come with fedrec; None: it may."""
    if not licence:
        return "has no licence"
    choices = [choice.strip(" ()") for one in licence.split("; ") for choice in one.split(" OR ")]
    if all(_extends(choice) for choice in choices):
        return f"has the licence {licence}, which would extend to fedrec"
    return None


def _extends(licence: str) -> bool:
    name = licence.upper()
    lesser = name.startswith("LGPL") or "LESSER" in name or "LIBRARY GENERAL" in name
    return not lesser and ("GPL" in name or "GENERAL PUBLIC" in name or "AFFERO" in name)


def main(bill: Path, table: Path) -> None:
    """Write the table of a bill."""
    rows = sorted(licences(json.loads(bill.read_text(encoding="utf-8"))), key=lambda row: row[0])
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("package", "version", "licence"), *rows])
    problems = [
        f"{name} {why}" for name, _, licence in rows if (why := problem_of(licence)) is not None
    ]
    if problems or not rows:
        sys.exit("\n".join(problems) or f"{bill} names no packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
