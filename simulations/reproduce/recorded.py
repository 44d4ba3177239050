# SPDX-License-Identifier: Apache-2.0
"""Shipped studies, published numbers, and our recorded numbers, `results.json`. This file is
written by `docs/record_results.py`, quoted in the documentation by `docs/fill_results.py`, and
summarised by `fedrec reproduce --list`.

It has, by study (`privrec/table2`), the command that prints it, version and commit of fedrec, the
date, the class of machine, the number of seeds, and its rows: by metric the mean, then the ends of
the 95 % interval if any, then the value of each draw (fold or else seed) if there are several,
rounded to four decimals. `inputs` are the non-empty training inputs of a row's system.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedrec.errors import ExperimentError, unknown, unreadable
from fedrec.report.inputs import Inputs
from fedrec.runtime.files import number, read_json
from simulations.studies.declaration import Cell, Study, declared

FOLDER = Path(__file__).with_name("papers")
PAPERS = (
    "privrec",
    "dp-vae",
    "targeted-dp",
    "pnbm",
    "upc-sdg",
    "adversaries",
    "bench",
    "new-items",
)
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
    "upc-sdg figure3": "its user is of Clothing, and the published files have no titles",
}
"""Tables and figures that are not reproduced, with the reason."""

UNRECORDED = {
    "privrec figure9": "times of a machine, which depend on its load",
    "privrec frontier-validation": "validation users, on which settings are selected",
    "bench synthetic-leave-one-out": "made-up data, to see it work",
    "bench synthetic-user-holdout": "made-up data, to see it work",
}
"""Studies whose numbers are deliberately neither recorded nor quoted, with the reason."""

FILE = Path(__file__).with_name("results.json")
_PUBLISHED = Path(__file__).with_name("published.csv")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_HEADLINES = ("Hits@10", "Hits@20", "NDCG@100", "Recall@20")
DECIMALS = 4


@cache
def studies() -> tuple[Study, ...]:
    """All studies of the papers, in their order."""
    return tuple(study for paper in PAPERS for study in declared(FOLDER / f"{paper}.toml"))


def find(paper: str, item: str | None) -> list[Study]:
    """Find the studies of a paper, or one of them.

    Args:
        paper: its name, or a TOML file of studies.
        item: for example `table2`; None: all.

    Raises:
        ExperimentError: the paper or the item is unknown.
    """
    file = FOLDER / f"{paper}.toml" if paper in PAPERS else Path(paper)
    if file.suffix != ".toml":
        expected = f"one of {', '.join(PAPERS)}, or a TOML file of studies"
        raise unknown("paper", paper, PAPERS, expected)
    items = {study.item: study for study in declared(file)}
    if item is None:
        return list(items.values())
    if why := NOT_HERE.get(f"{paper} {item}"):
        problem = f"{paper} has no study {item!r}: {why}"
        raise ExperimentError(problem, fix=f"choose one of {', '.join(items)}")
    if item not in items:
        raise unknown(f"study of {paper}", item, items)
    return [items[item]]


def published(paper: str, item: str, dataset: str = "") -> dict[Cell, float]:
    """Published numbers of a paper (`published.csv`) by dataset, model and metric, in the paper's
    order; infinite where the paper prints infinity; empty for an unknown table.

    The source of each number is in the file's first two columns. Its column `suspect` marks an
    impossible printed value (PrivRec's table 3 has a Hits@10 below its Hits@5). Figures without
    printed numbers are not included.

    Args:
        paper: such as `upc-sdg`.
        item: for example `table2`; a suffix such as `-gowalla` is ours.
        dataset: prefix of the data sets of the rows.
    """
    table = paper, item.partition("-")[0]
    with _PUBLISHED.open(newline="", encoding="utf-8") as file:
        return {
            (row["dataset"], row["model"], row["metric"]): float(row["value"])
            for row in csv.DictReader(file)
            if (row["paper"], row["item"]) == table and row["dataset"].startswith(dataset)
        }


@dataclass(frozen=True)
class Number:
    """Mean over draws with its interval, see `simulations.studies.tables.draws`.

    Attributes:
        mean: mean over the draws.
        low: lower end of the 95 % interval; NaN without an interval.
        high: its upper end.
        values: value of each fold or seed; empty if there is only one.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    values: tuple[float, ...] = ()

    def text(self, digits: int = 3, *, interval: bool = True) -> str:
        """Format the number as `.205 ± .004`, or with the interval over users `.190 to .220` if it
        has one seed.

        Args:
            digits: number of decimals.
            interval: whether to add the interval, if any.
        """
        mean = decimal(self.mean, digits)
        if not interval or math.isnan(self.low) or self.low == self.high:
            return mean
        half = (self.high - self.low) / 2
        even = math.isclose(self.mean, (self.high + self.low) / 2, abs_tol=2 * 10**-DECIMALS)
        if self.values and even:
            return f"{mean} ± {decimal(half, digits)}"
        return f"{mean} ({decimal(self.low, digits)} to {decimal(self.high, digits)})"


@dataclass(frozen=True)
class Recorded:
    """Recorded numbers of a study.

    Attributes:
        command: command that prints them.
        fedrec: version of fedrec.
        commit: commit of its source, with a plus if files differed, or several; empty without a
            checkout.
        date: when the last task ended, as in 2026-01-31.
        machine: class of machine.
        seeds: number of seeds.
        part: number of tasks that were run, such as `3 of 23`; empty: all.
        rows: numbers by row and metric; a row's name begins with its data set if there are several.
        differences: differences of two rows paired by draw, by metric: mean, ends of the 95 %
            interval, p of the t-test, number of draws.
        inputs: inputs of each row that states them.
    """

    command: str
    fedrec: str
    commit: str
    date: str
    machine: str
    seeds: int
    rows: Mapping[str, Mapping[str, Number]]
    differences: Mapping[str, Mapping[str, tuple[float, ...]]]
    part: str = ""
    inputs: Mapping[str, Inputs] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """Main number of the first row, as text."""
        row, numbers = next(iter(self.rows.items()))
        finite = [name for name, number in numbers.items() if math.isfinite(number.mean)]
        metric = next((name for name in _HEADLINES if name in finite), [*finite, *numbers][0])
        return f"{row} {metric} {numbers[metric].text()}".strip()


def decimal(value: float, digits: int) -> str:
    """Format a number as in papers: without the zero before the point, large integers with
    commas."""
    if not math.isfinite(value):
        return "infinite" if math.isinf(value) else "-"
    if value == round(value) and abs(value) >= 10:
        return f"{value:,.0f}"
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text


def recorded(file: Path = FILE) -> dict[str, Recorded]:
    """Read all recorded numbers by study.

    Args:
        file: path of the file.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        return {name: _read(table) for name, table in read_json(file).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(
            file, error, "restore it, from the repository if it came with fedrec"
        ) from None


def _read(table: dict[str, Any]) -> Recorded:
    rows: dict[str, dict[str, Number]] = {}
    for row, metrics in table["rows"].items():
        for metric, texts in metrics.items():
            values = tuple(map(number, texts))
            rows.setdefault(row, {})[metric] = Number(*values[:3], values=values[3:])
    compared = {
        names: {metric: tuple(map(number, texts)) for metric, texts in metrics.items()}
        for names, metrics in table.get("differences", {}).items()
    }
    inputs = {row: Inputs.of_table(stated) for row, stated in table.get("inputs", {}).items()}
    return Recorded(**{**table, "rows": rows, "differences": compared, "inputs": inputs})


def key(study: Study) -> str:
    """Name of a study in `results.json`."""
    return f"{study.paper}/{study.item}"


def source_of(paper: str, item: str) -> str:
    """Paper for `fedrec reproduce`, or the benchmarks' file with the item."""
    file = BENCHMARKS / f"{paper}.toml"
    if paper in PAPERS and (not file.is_file() or item in {s.item for s in find(paper, None)}):
        return paper
    return str(file)


def command(study: Study, seeds: int | None = None) -> str:
    """Command that prints a study's table.

    Args:
        study: the study.
        seeds: number of seeds; None: that of the study.
    """
    paper = source_of(study.paper, study.item)
    paper = paper if paper in PAPERS else f"{BENCHMARKS.name}/{study.paper}.toml"
    seeded = any(task.seeded for task in study.tasks)
    more = f" --seeds {seeds}" if seeded and seeds not in (None, study.seeds) else ""
    return f"fedrec reproduce {paper} {study.item}{more}"
