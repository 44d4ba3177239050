# SPDX-License-Identifier: Apache-2.0
"""Tables of a benchmark: a CSV file, and Markdown on the terminal."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def save_table(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with equal keys as CSV, and print them as Markdown; no rows leave no file."""
    if not rows:
        return
    with open(file, "w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"\n{file.name}\n\n{_line(rows[0])}\n|" + "---|" * len(rows[0]))
    for row in rows:
        print(_line(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
