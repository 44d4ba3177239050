# SPDX-License-Identifier: Apache-2.0
"""Comparison tables: cells, marks, and missing values."""

import io
import math

from rich.console import Console

from fedrec.report.summary import comparison_table

ROWS = {
    "popularity": {"hits@10": 0.1, "rmse": 1.25},
    "ease [500]": {"hits@10": 0.24, "rmse": math.nan},
    "mine": {"hits@10": 0.24001, "rmse": 0.9},
}


def printed(rows, metrics):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(comparison_table(rows, metrics))
    return console.export_text(styles=True)


def test_missing_values_are_dashes():
    lines = printed(ROWS, ["hits@10", "rmse", "mrr"]).splitlines()
    (row,) = (line for line in lines if "ease [500]" in line)
    assert row.count(" - ") == 2


def test_the_best_values_as_printed_are_bold():
    text = printed(ROWS, ["hits@10", "rmse"])
    assert text.count("\x1b[1m0.2400\x1b[0m") == 2  # 0.24 and 0.24001 are printed the same
    assert "\x1b[1m0.9000\x1b[0m" in text and "\x1b[1m1.2500" not in text


def test_no_system():
    assert "system" in printed({}, ["mrr"]) and "mrr" in printed({}, ["mrr"])
