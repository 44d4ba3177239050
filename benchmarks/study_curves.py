# SPDX-License-Identifier: Apache-2.0
"""Curves out of the tables of studies (`fedrec reproduce`), as one SVG file.

    python -m benchmarks.study_curves OUT.svg TABLE.csv [TABLE.csv ...] --rows PATTERN

A panel for each metric. PATTERN is a regular expression for whole rows: its group `x` is the place
on the horizontal axis, `name`, with `more` behind it, the curve. Rows that do not match are dashed
lines. With `--against METRIC` the value of that metric is the place, and the group `label` is
written beside the point.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.curves import Panel, write_panels


def panels(
    table: pd.DataFrame, pattern: str, against: str | None = None, **drawn: bool | float | None
) -> list[Panel]:
    """A panel for each metric but that of the horizontal axis.

    Args:
        table: of studies, with the columns `model`, `metric` and `ours`.
        pattern: of rows.
        against: metric of the horizontal axis.
        drawn: further arguments of the panels.
    """
    wide: Any = table.pivot_table("ours", "model", "metric", sort=False)
    found = []
    for metric in wide.columns.drop(against, errors="ignore"):
        lines: dict[str, list[tuple]] = {}
        levels = {}
        across = against or "x"
        for row, value in wide[metric].dropna().items():
            match = re.fullmatch(pattern, str(row))
            if match is None:
                levels[str(row)] = float(value)
                continue
            parts = match.groupdict("")
            name = parts["name"] + parts.get("more", "")
            x = float(parts["x"] if against is None else wide.at[row, against])
            label = (parts["label"],) if parts.get("label") else ()
            lines.setdefault(name, []).append((x, float(value), *label))
        found.append(Panel(str(metric), across, lines, levels, **drawn))  # type: ignore[arg-type]
    return found


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--rows", required=True, help="pattern of rows")
    parser.add_argument("--metric", action="append", help="only these; default: all")
    parser.add_argument("--against", help="metric of the horizontal axis")
    parser.add_argument("--logarithmic", action="store_true")
    parser.add_argument("--most", type=float, help="larger values are drawn at the edge")
    given = parser.parse_args()
    table: Any = pd.concat([pd.read_csv(file) for file in given.tables])
    if given.metric:
        table = table[table["metric"].isin([*given.metric, given.against])]
    drawn = {"logarithmic": given.logarithmic, "most": given.most}
    write_panels(given.output, panels(table, given.rows, given.against, **drawn))


if __name__ == "__main__":
    main()
