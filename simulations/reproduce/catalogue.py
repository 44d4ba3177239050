# SPDX-License-Identifier: Apache-2.0
"""All studies by paper and item, and the numbers that the papers print."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError
from simulations.studies.declaration import Cell, Study, declared

FOLDER = Path(__file__).with_name("papers")
PAPERS = ("privrec", "dp-vae", "targeted-dp", "pnbm", "upc-sdg", "adversaries", "bench")
NOT_HERE = {
    "privrec figure1": "a diagram of the system",
    "privrec table1": "notation",
    "dp-vae figure1": "a diagram of the network",
    "dp-vae figure2": "a diagram of the system",
    "dp-vae table1": "notation",
    "dp-vae table4": "settings of the compared systems, in words",
    "dp-vae table5": "needs ML-20M and Netflix: hours of training and 25 GB of memory",
    "dp-vae table9": "needs ML-20M and Netflix",
    "targeted-dp figure1": "a diagram of the method",
    "upc-sdg figure1": "a diagram of the method",
    "upc-sdg figure3": "its user and titles are of Clothing: see benchmarks/upc_sdg_example.py",
}
"""Tables and figures that are not reproduced, with the reason."""

UNRECORDED = {
    "privrec figure9": "times of a machine, which other work on it changes",
    "privrec frontier-validation": "validation users, on whom settings are chosen",
    "bench synthetic-leave-one-out": "made-up data, to see it work",
    "bench synthetic-user-holdout": "made-up data, to see it work",
}
"""Studies of which no numbers are recorded on purpose, with the reason; they are nowhere quoted."""


@cache
def studies() -> tuple[Study, ...]:
    """Every study of the papers, in their order."""
    return tuple(one for paper in PAPERS for one in declared(FOLDER / f"{paper}.toml"))


def find(paper: str, item: str | None) -> list[Study]:
    """The studies of a paper, or one of them.

    Args:
        paper: its name, or a TOML file of studies.
        item: such as `table2`; None: all.

    Raises:
        ExperimentError: there is no such paper, or no such table.
    """
    file = FOLDER / f"{paper}.toml" if paper in PAPERS else Path(paper)
    if file.suffix != ".toml":
        raise ExperimentError(
            f"there is no paper {paper!r}",
            expected="one of " + ", ".join(PAPERS) + ", or a TOML file of studies",
            got=repr(paper),
            fix=did_you_mean(paper, PAPERS),
        )
    items = {study.item: study for study in declared(file)}
    if item is None:
        return list(items.values())
    wanted = item.lower().replace(" ", "")
    if wanted not in items:
        wanted = wanted.replace("-", "")  # as in figure-2
    if wanted not in items:
        why = NOT_HERE.get(f"{paper} {wanted}")
        raise ExperimentError(
            f"{paper} has no {item!r} here" + (f": {why}" if why else ""),
            expected="one of " + ", ".join(items),
            got=repr(item),
            fix=None if why else did_you_mean(wanted, items),
        )
    return [items[wanted]]


# The numbers that the papers print, `published.csv`; the source of each is in the table's first two
# columns.
#
# Its column `suspect` marks a printed value that cannot be right (PrivRec's table 3 has a Hits@10
# below its Hits@5). Figures without printed numbers, such as those of PNBM and of the poster on
# targeted privacy, have none here.

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
