# SPDX-License-Identifier: Apache-2.0
"""The studies that come with fedrec, the numbers that papers print, and ours, `results.json`. The
pages of the documentation are filled from it (`docs/fill_results.py`), and `fedrec reproduce
--list` prints its headlines.

By study (`privrec/table2`), each with the command that prints it, version and commit of fedrec, the
day, the class of machine, the number of seeds, and its rows: by metric the mean, then the ends of
the 95 % interval where there is one, then the value of each draw, that is of each fold or else
seed, where there are several, rounded to four decimals. `inputs` are what the system of a row had
to learn from, without what is empty.
"""

from __future__ import annotations

import csv
import json
import math
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError, RunError
from fedrec.report.inputs import Inputs
from fedrec.runtime.files import read_json, write_atomically
from fedrec.runtime.shared_memory import number
from simulations.studies.declaration import Cell, Found, Study, TaskJob, declared, made
from simulations.studies.runs import StudyFolder
from simulations.studies.tables import comparison, differences, draws, inputs_of

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
    "privrec figure9": "times of a machine, which other work on it changes",
    "privrec frontier-validation": "validation users, on whom settings are chosen",
    "bench synthetic-leave-one-out": "made-up data, to see it work",
    "bench synthetic-user-holdout": "made-up data, to see it work",
}
"""Studies of which no numbers are recorded on purpose, with the reason; they are nowhere quoted."""

FILE = Path(__file__).with_name("results.json")
_PUBLISHED = Path(__file__).with_name("published.csv")
_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_HEADLINES = ("Hits@10", "Hits@20", "NDCG@100", "Recall@20")
_DECIMALS = 4


@cache
def studies() -> tuple[Study, ...]:
    """Every study of the papers, in their order."""
    return tuple(study for paper in PAPERS for study in declared(FOLDER / f"{paper}.toml"))


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


def published(paper: str, item: str, dataset: str = "") -> dict[Cell, float]:
    """The numbers that a paper prints (`published.csv`) by dataset, model and metric, in the
    paper's order; infinite where the paper prints infinity; none for an unknown table.

    The source of each number is in the file's first two columns. Its column `suspect` marks a
    printed value that cannot be right (PrivRec's table 3 has a Hits@10 below its Hits@5). Figures
    without printed numbers have none there.

    Args:
        paper: such as `upc-sdg`.
        item: such as `table2`; what follows a hyphen, as in `table2-gowalla`, is ours.
        dataset: only rows whose data set begins so.
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
    """A mean over draws with its interval, see `simulations.studies.tables.draws`.

    Attributes:
        mean: over the draws.
        low: lower end of the 95 % interval; NaN where there is none.
        high: its upper end.
        values: of each fold or seed; none where there is one.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    values: tuple[float, ...] = ()

    def text(self, digits: int = 3, *, interval: bool = True) -> str:
        """The number, as in `.205 ± .004`; with `.190 to .220` for its users where it is of one
        seed.

        Args:
            digits: decimals.
            interval: whether to add it, where there is one.
        """
        mean = decimal(self.mean, digits)
        if not interval or math.isnan(self.low) or self.low == self.high:
            return mean
        half = (self.high - self.low) / 2
        even = math.isclose(self.mean, (self.high + self.low) / 2, abs_tol=2 * 10**-_DECIMALS)
        if self.values and even:
            return f"{mean} ± {decimal(half, digits)}"
        return f"{mean} ({decimal(self.low, digits)} to {decimal(self.high, digits)})"


@dataclass(frozen=True)
class Recorded:
    """A study's numbers.

    Attributes:
        command: that prints them.
        fedrec: version of it.
        commit: of its source, with a plus if files differed from it, or several; empty where it was
            not run from a checkout.
        date: when the last task ended, as in 2026-01-31.
        machine: its class.
        seeds: number of them.
        part: how many of the tasks were run, such as `3 of 23`; empty: all.
        tasks: the rows of each of those tasks; empty: all were run.
        rows: by row and metric; a row's name begins with its data set where there are several.
        differences: of two rows paired by draw, by metric: mean, ends of the 95 % interval, p of
            the t-test, number of draws.
        inputs: of each row that states them.
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
    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    inputs: Mapping[str, Inputs] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """One of the numbers, of the first row."""
        row, numbers = next(iter(self.rows.items()))
        finite = [name for name, number in numbers.items() if math.isfinite(number.mean)]
        metric = next((name for name in _HEADLINES if name in finite), [*finite, *numbers][0])
        return f"{row} {metric} {numbers[metric].text()}".strip()

    @property
    def source(self) -> str:
        """Command, seeds, version, machine and day, for below a table."""
        seeds = f", {self.seeds} seeds" if self.seeds > 1 else ""
        seeds += f", {self.part} tasks so far" if self.part else ""
        commit = self.commit.replace("+", " with changes") or "commit not known"
        version = f"fedrec {self.fedrec} ({commit}), {self.machine}, {self.date}"
        return f"`{self.command}`{seeds}; {version}"


def decimal(value: float, digits: int) -> str:
    """A number as in papers: without the zero before the point, large integers with commas."""
    if not math.isfinite(value):
        return "infinite" if math.isinf(value) else "-"
    if value == round(value) and abs(value) >= 10:
        return f"{value:,.0f}"
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text


def recorded(file: Path = FILE) -> dict[str, Recorded]:
    """All that is recorded, by study.

    Args:
        file: where it is.

    Raises:
        RunError: it cannot be read.
    """
    try:
        return {name: _read(table) for name, table in read_json(file).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{file} cannot be read",
            expected="a file as fedrec wrote it",
            got=f"{type(error).__name__}: {error}",
            fix="restore it, from the repository if it came with fedrec",
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


def record(folder: Path, file: Path = FILE) -> str:
    """Put the finished tasks of a study into the file. A complete study takes the place of what the
    file had of it; to a part, tasks of earlier runs with as many seeds are added. A task that has
    fewer seeds than others counts as not finished.

    Args:
        folder: of the study, as `fedrec reproduce ... --output` made it.
        file: the file; made unless it is there.

    Returns:
        The study's name there.

    Raises:
        RunError: the folder has no finished task, or is of the small version of a study; or it has
            a part, and the file the complete study, or tasks with another number of seeds.
    """
    study, jobs = _of(folder)
    table = entry(study, jobs)
    if table is None:
        raise RunError(f"{folder} has no finished task", fix="run the study, see its study.json")
    tables = read_json(file) if file.is_file() else {}
    before = tables.get(key(study))
    if before is not None and "part" in table:
        if "tasks" not in before or table["seeds"] != before["seeds"]:
            raise RunError(
                f"a part of {key(study)} would take the place of more",
                expected="the whole study, or where the file has a part: "
                f"tasks with {before['seeds']} seeds",
                got=f"{table['part']} tasks with {table['seeds']} seeds in {folder}, and "
                f"{before.get('part', 'all')} tasks in {file}",
                fix=f"finish the study, or delete {key(study)!r} from the file",
            )
        table = _joined(study, before, table)
    tables[key(study)] = {"command": command(study, table["seeds"]), **table}
    write_atomically(file, text_of(dict(sorted(tables.items()))))
    return key(study)


def entry(study: Study, jobs: list[TaskJob]) -> dict[str, Any] | None:
    """The numbers of the finished tasks of a study, as they stand in the file, without the command;
    None where none is finished."""
    done = _finished(jobs)
    if not done:
        return None
    drawn = draws(done)
    values: dict[Cell, list[float]] = {}
    for _, result in drawn:
        values.setdefault(result.cell, []).append(result.value)
    names = row_names(values, study)
    rows: dict[str, dict[str, list[Any]]] = {}
    for row in comparison({}, (result for _, result in drawn)).to_dict("records"):
        cell = row["dataset"], row["model"], row["metric"]
        several = len(values[cell]) > 1
        ends = [row["low"], row["high"]] if several or not math.isnan(row["low"]) else []
        numbers = [row["ours"], *ends, *(values[cell] if several else [])]
        rows.setdefault(names[cell], {})[row["metric"]] = list(map(_short, numbers))
    tasks: dict[str, dict[str, None]] = {}
    for job, results in done:
        cells = dict.fromkeys(names[result.cell] for result in results)
        tasks.setdefault(job.task.name, {}).update(cells)
    stated = inputs_of(result for _, result in drawn)
    inputs = {
        name: {key: value for key, value in asdict(stated[cell[:2]]).items() if value}
        for cell, name in names.items()
        if cell[:2] in stated
    }
    return {
        **_made([job for job, _ in done]),
        **_part(study, tasks),
        "seeds": len({job.seed for job, _ in done}),
        "rows": rows,
        **_not_empty(inputs=inputs, differences=_differences(study, drawn)),
    }


def _not_empty(**tables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: table for name, table in tables.items() if table}


def _part(study: Study, tasks: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The tasks that were run, with the rows of each; nothing where all were."""
    if len(tasks) == len(study.tasks):
        return {}
    rows = {name: list(names) for name, names in tasks.items()}
    return {"part": f"{len(tasks)} of {len(study.tasks)}", "tasks": rows}


def _differences(
    study: Study, drawn: Iterable[tuple[int, Found]]
) -> dict[str, dict[str, list[Any]]]:
    """Of the rows that a study compares, see `Recorded`."""
    tables: dict[str, dict[str, list[Any]]] = {}
    for row in differences(study.compared, drawn).to_dict("records"):
        numbers = [row[name] for name in ("difference", "low", "high", "t", "draws")]
        tables.setdefault(row["rows"], {})[row["metric"]] = list(map(_short, numbers))
    return tables


def _joined(study: Study, before: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Tasks of an earlier run and of this one, in the study's order, with the commits of both."""
    ran = {**before["tasks"], **table["tasks"]}
    tasks = {task.name: ran[task.name] for task in study.tasks if task.name in ran}
    rows, inputs, compared = (
        {**before.get(name, {}), **table.get(name, {})}
        for name in ("rows", "inputs", "differences")
    )
    rows = {row: rows[row] for names in tasks.values() for row in names}
    drawn = [
        (draw, Found("", row, metric, number(value)))
        for row, metrics in rows.items()
        for metric, numbers in metrics.items()
        for draw, value in enumerate(numbers[3:])
    ]
    commits = dict.fromkeys([*before["commit"].split(", "), table["commit"]])
    about = {key: value for key, value in table.items() if key not in ("part", "tasks")}
    return {
        **about,
        "commit": ", ".join(filter(None, commits)),
        **_part(study, tasks),
        "rows": rows,
        **_not_empty(inputs=inputs, differences=compared | _differences(study, drawn)),
    }


def _finished(jobs: list[TaskJob]) -> list[tuple[TaskJob, list[Found]]]:
    """The numbers of tasks that were run with as many seeds as any."""
    done = [(job, results[0]) for job in jobs if (results := job.results()) is not None]
    seeds = Counter(job.task.name for job, _ in done)
    most = max(seeds.values(), default=0)
    return [pair for pair in done if seeds[pair[0].task.name] == most or not pair[0].task.seeded]


def key(study: Study) -> str:
    """The name of a study in the file."""
    return f"{study.paper}/{study.item}"


def study_of(name: str) -> Study:
    """The study of a name in the file: of a paper, or of `benchmarks/`.

    Raises:
        ExperimentError: there is none.
    """
    paper, _, item = name.partition("/")
    (study,) = find(_source(paper, item), item)
    return study


def _source(paper: str, item: str) -> str:
    """Name of the paper for `fedrec reproduce`, or the file of the benchmarks with the item."""
    file = _BENCHMARKS / f"{paper}.toml"
    if paper in PAPERS and (not file.is_file() or item in {s.item for s in find(paper, None)}):
        return paper
    return str(file)


def command(study: Study, seeds: int | None = None) -> str:
    """The command that prints a study's table.

    Args:
        study: the study.
        seeds: number of seeds; None: that of the study.
    """
    paper = _source(study.paper, study.item)
    paper = paper if paper in PAPERS else f"{_BENCHMARKS.name}/{study.paper}.toml"
    seeded = any(task.seeded for task in study.tasks)
    more = f" --seeds {seeds}" if seeded and seeds not in (None, study.seeds) else ""
    return f"fedrec reproduce {paper} {study.item}{more}"


def row_names(cells: Iterable[Cell], study: Study) -> dict[Cell, str]:
    """The names of rows: their model, after the data set where the study, of which the cells may be
    a part, has several."""
    cells = list(cells)
    several = len(_datasets(study)) > 1 or len({dataset for dataset, _, _ in cells}) > 1
    return {
        cell: ", ".join(filter(None, (cell[0] if several or not cell[1] else "", cell[1])))
        for cell in cells
    }


def _datasets(study: Study) -> set[str]:
    return {str(task.options.get("dataset", "")) for task in study.tasks}


def printed(name: str) -> dict[tuple[str, str], float]:
    """The numbers of the paper, by row and metric as they are named here."""
    study = study_of(name)
    ours = _datasets(study)
    numbers = published(study.paper, study.item, study.published)
    cells = {cell: value for cell, value in numbers.items() if cell[0] in ours}
    names = row_names(cells, study)
    return {(names[cell], cell[2]): value for cell, value in cells.items()}


def text_of(tables: Mapping[str, Any]) -> str:
    """The file's text: a line for each row."""
    entries = []
    for name, table in tables.items():
        lines = []
        for key, value in table.items():
            if isinstance(value, dict):
                rows = [f"   {_json(row)}: {_json(numbers)}" for row, numbers in value.items()]
                lines.append(f"  {_json(key)}: {{\n" + ",\n".join(rows) + "\n  }")
            else:
                lines.append(f"  {_json(key)}: {_json(value)}")
        entries.append(f" {_json(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _of(folder: Path) -> tuple[Study, list[TaskJob]]:
    about = StudyFolder(folder, "study.json", "study").read("study.json")
    if about["quick"]:
        raise RunError(
            f"{folder} is of the small version of a study",
            expected="the folder of a whole study",
            got="one that ran with --quick",
            fix="run the study without --quick, into another folder",
        )
    study = study_of(f"{about['paper']}/{about['item']}")
    seeds = [int(path.name.rpartition("-seed")[2]) for path in (folder / "tasks").glob("*-seed*")]
    return study, study.jobs(folder, max(seeds, default=0) - study.first_seed + 1, quick=False)


def _made(jobs: list[TaskJob]) -> dict[str, str]:
    """Of the last of the tasks, with the commits of all; of those of an earlier version all but the
    commit is known."""
    tables = [{**made(), "commit": None, **read_json(job.folder / "found.json")} for job in jobs]
    last = max(tables, key=lambda table: str(table["date"]))
    commits = dict.fromkeys(table["commit"] for table in tables if table["commit"])
    ancestors = dict.fromkeys(filter(None, map(_ancestor, commits)))
    return {**{name: last[name] or "" for name in made()}, "commit": ", ".join(ancestors)}


def _ancestor(commit: str) -> str:
    """A commit as those know it who have this checkout: if it is not in its history, such as one of
    a branch that was rebased, the newest one before it that is, with a plus."""
    name = commit.removesuffix("+")
    git = ["git", "-C", str(FILE.parent), "merge-base", name, "HEAD"]
    try:
        base = subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit if base.startswith(name) else f"{base[: len(name)]}+"


def _short(value: float) -> float | str | None:
    if not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    if value == round(value):
        return round(value)
    small = abs(value) < 10**-3
    return float(f"{value:.{_DECIMALS}g}") if small else round(float(value), _DECIMALS)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
