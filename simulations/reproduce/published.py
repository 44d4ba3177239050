# SPDX-License-Identifier: Apache-2.0
"""The numbers that the papers print, `published.csv`; the source of each is in the table's first
two columns.

`suspect` marks a printed value that cannot be right (PrivRec's table 3 has a Hits@10 below its
Hits@5). Figures without printed numbers, such as those of PNBM and of the poster on targeted
privacy, have none here.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("published.csv")


class Published(NamedTuple):
    """A printed number.

    Attributes:
        value: the number; infinite if the paper prints infinity.
        suspect: whether it cannot be right.
    """

    value: float
    suspect: bool


Cell = tuple[str, str, str]
"""Dataset, model, metric."""


def published(paper: str, item: str, dataset: str = "") -> dict[Cell, Published]:
    """The numbers of a table by dataset, model and metric, in the paper's order; none for an
    unknown one.

    Args:
        paper: such as `upc-sdg`.
        item: such as `table2`; what follows a hyphen, as in `table2-gowalla`, is ours.
        dataset: only rows whose data set begins so.
    """
    found: dict[Cell, Published] = {}
    item = item.partition("-")[0]
    with FILE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            of_table = (row["paper"], row["item"]) == (paper, item)
            if of_table and row["dataset"].startswith(dataset):
                value = math.inf if row["value"] == "inf" else float(row["value"])
                cell = row["dataset"], row["model"], row["metric"]
                found[cell] = Published(value, row["suspect"] == "yes")
    return found
