# SPDX-License-Identifier: Apache-2.0
"""The numbers that the papers print, `published.csv`; the source of each is in the table's first
two columns.

Its column `suspect` marks a printed value that cannot be right (PrivRec's table 3 has a Hits@10
below its Hits@5). Figures without printed numbers, such as those of PNBM and of the poster on
targeted privacy, have none here.
"""

from __future__ import annotations

import csv
from pathlib import Path

from simulations.study.study import Cell

FILE = Path(__file__).with_name("published.csv")


def published(paper: str, item: str, dataset: str = "") -> dict[Cell, float]:
    """The numbers of a table by dataset, model and metric, in the paper's order; infinite where the
    paper prints infinity; none for an unknown table.

    Args:
        paper: such as `upc-sdg`.
        item: such as `table2`; what follows a hyphen, as in `table2-gowalla`, is ours.
        dataset: only rows whose data set begins so.
    """
    item = item.partition("-")[0]
    with FILE.open(newline="", encoding="utf-8") as file:
        return {
            (row["dataset"], row["model"], row["metric"]): float(row["value"])
            for row in csv.DictReader(file)
            if (row["paper"], row["item"]) == (paper, item) and row["dataset"].startswith(dataset)
        }
