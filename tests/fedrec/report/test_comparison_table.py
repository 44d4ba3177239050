# SPDX-License-Identifier: Apache-2.0
"""Comparison tables: alignment, marks, and missing values."""

from __future__ import annotations

import io
import math

from rich.console import Console

from fedrec.report.table import comparison_table, plain_table

ROWS = {
    "popularity": {"hits@10": 0.1, "rmse": 1.25},
    "ease [500]": {"hits@10": 0.24, "rmse": math.nan},
    "mine": {"hits@10": 0.24001, "rmse": 0.9},
}


def test_plain_text():
    assert plain_table(ROWS, ["hits@10", "rmse", "mrr"]).splitlines() == [
        "system      hits@10     rmse   mrr",
        "popularity   0.1000   1.2500     -",
        "ease [500]   0.2400*       -     -",
        "mine         0.2400*  0.9000*    -",
    ]


def test_terminal_table_holds_the_same_cells_and_marks_the_best():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(comparison_table(ROWS, ["hits@10", "rmse"]))
    text = console.export_text(styles=True)
    assert "ease [500]" in text and "-" in text
    assert "\x1b[1m0.9000\x1b[0m" in text and "\x1b[1m1.2500" not in text


def test_no_system():
    assert plain_table({}, ["mrr"]) == "system  mrr"
