# SPDX-License-Identifier: Apache-2.0
"""Our numbers of the papers' tables and figures, and of further studies: `results.json`. The pages
of the documentation are filled from it (`docs/fill_results.py`), and `fedrec reproduce --list`
prints its headlines.

By study (`privrec/table2`), each with the command that prints it, version and commit of fedrec, the
day, the class of machine, the number of seeds, and its rows: by metric the mean, then the ends of
the 95 % interval where there is one, then the value of each draw, that is of each fold or else
seed, where there are several, rounded to four decimals. `inputs` are what the system of a row had
to learn from, without what is empty.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedrec.errors import RunError
from fedrec.report.inputs import Inputs
from fedrec.runtime.files import read_json, write_atomically
from fedrec.runtime.shared_memory import number
from simulations.reproduce.catalogue import PAPERS, find, published
from simulations.studies.declaration import Cell, Found, Study, TaskJob, made
from simulations.studies.runs import StudyFolder
from simulations.studies.tables import comparison, differences, draws, inputs_of

FILE = Path(__file__).with_name("results.json")
_HEADLINES = ("Hits@10", "Hits@20", "NDCG@100", "Recall@20")
_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_DECIMALS = 4


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
        made = f"fedrec {self.fedrec} ({commit}), {self.machine}, {self.date}"
        return f"`{self.command}`{seeds}; {made}"


def decimal(value: float, digits: int) -> str:
    """A number as in papers: without the zero before the point, large whole ones with commas."""
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
    def estimate(parts: list[Any]) -> Number:
        numbers = [number(part) for part in parts]
        return Number(*numbers[:3], values=tuple(numbers[3:]))

    rows = {
        row: {metric: estimate(parts) for metric, parts in own.items()}
        for row, own in table["rows"].items()
    }
    apart = {
        rows: {metric: tuple(map(number, parts)) for metric, parts in own.items()}
        for rows, own in table.get("differences", {}).items()
    }
    inputs = {row: Inputs.of_table(own) for row, own in table.get("inputs", {}).items()}
    return Recorded(**{**table, "rows": rows, "differences": apart, "inputs": inputs})


def record(folder: Path, file: Path = FILE) -> str:
    """Put the finished tasks of a study into the file. A whole study takes the place of what the
    file had of it; to a part, tasks of earlier runs with as many seeds are added. A task that has
    fewer seeds than others counts as not finished.

    Args:
        folder: of the study, as `fedrec reproduce ... --output` made it.
        file: the file; made unless it is there.

    Returns:
        The study's name there.

    Raises:
        RunError: the folder has no finished task, or is of the small version of a study; or it has
            a part, and the file the whole study, or tasks with another number of seeds.
    """
    study, jobs = _of(folder)
    found = entry(study, jobs)
    if found is None:
        raise RunError(f"{folder} has no finished task", fix="run the study, see its study.json")
    known = read_json(file) if file.is_file() else {}
    before = known.get(key(study))
    if before is not None and "part" in found:
        if "tasks" not in before or found["seeds"] != before["seeds"]:
            raise RunError(
                f"a part of {key(study)} would take the place of more",
                expected="the whole study, or where the file has a part: "
                f"tasks with {before['seeds']} seeds",
                got=f"{found['part']} tasks with {found['seeds']} seeds in {folder}, and "
                f"{before.get('part', 'all')} tasks in {file}",
                fix=f"finish the study, or delete {key(study)!r} from the file",
            )
        found = _joined(study, before, found)
    known[key(study)] = {"command": command(study, found["seeds"]), **found}
    write_atomically(file, text_of(dict(sorted(known.items()))))
    return key(study)


def entry(study: Study, jobs: list[TaskJob]) -> dict[str, Any] | None:
    """What the finished tasks of a study found, as it stands in the file, without the command; None
    where none is finished."""
    done = _finished(jobs)
    if not done:
        return None
    found = draws(done)
    values: dict[Cell, list[float]] = {}
    for _, one in found:
        values.setdefault(one.cell, []).append(one.value)
    names = row_names(values, study)
    rows: dict[str, dict[str, list[Any]]] = {}
    for row in comparison({}, (one for _, one in found)).to_dict("records"):
        cell = row["dataset"], row["model"], row["metric"]
        several = len(values[cell]) > 1
        ends = [row["low"], row["high"]] if several or not math.isnan(row["low"]) else []
        numbers = [row["ours"], *ends, *(values[cell] if several else [])]
        rows.setdefault(names[cell], {})[row["metric"]] = list(map(_short, numbers))
    table = _made([job for job, _ in done])
    tasks: dict[str, dict[str, None]] = {}
    for job, numbers in done:
        own = tasks.setdefault(job.task.name, {})
        own.update(dict.fromkeys(names[one.cell] for one in numbers))
    inputs = _stated(names, inputs_of(one for _, one in found))
    further = {"inputs": inputs, "differences": _differences(study, found)}
    seeds = len({job.seed for job, _ in done})
    return {
        **table,
        **_part(study, tasks),
        "seeds": seeds,
        "rows": rows,
        **{what: own for what, own in further.items() if own},
    }


def _part(study: Study, tasks: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """Which of the tasks were run, with the rows of each; nothing where all were."""
    if len(tasks) == len(study.tasks):
        return {}
    rows = {name: list(own) for name, own in tasks.items()}
    return {"part": f"{len(tasks)} of {len(study.tasks)}", "tasks": rows}


def _differences(
    study: Study, found: Iterable[tuple[int, Found]]
) -> dict[str, dict[str, list[Any]]]:
    """Of the rows that a study compares, see `Recorded`."""
    apart: dict[str, dict[str, list[Any]]] = {}
    for row in differences(study.compared, found).to_dict("records"):
        own = [row[key] for key in ("difference", "low", "high", "t", "draws")]
        apart.setdefault(row["rows"], {})[row["metric"]] = list(map(_short, own))
    return apart


def _joined(study: Study, before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Tasks of an earlier run and of this one, in the study's order, with the commits of both."""
    ran = {**before["tasks"], **found["tasks"]}
    tasks = {task.name: ran[task.name] for task in study.tasks if task.name in ran}
    both = {
        what: {**before.get(what, {}), **found.get(what, {})}
        for what in ("rows", "inputs", "differences")
    }
    rows = {row: both["rows"][row] for own in tasks.values() for row in own}
    numbers = [
        (draw, Found("", row, metric, number(value)))
        for row, own in rows.items()
        for metric, parts in own.items()
        for draw, value in enumerate(parts[3:])
    ]
    further = {
        **both,
        "rows": rows,
        "differences": both["differences"] | _differences(study, numbers),
    }
    commits = dict.fromkeys([*before["commit"].split(", "), found["commit"]])
    return {
        **{key: value for key, value in found.items() if key not in ("part", "tasks")},
        "commit": ", ".join(filter(None, commits)),
        **_part(study, tasks),
        **{what: own for what, own in further.items() if own},
    }


def _finished(jobs: list[TaskJob]) -> list[tuple[TaskJob, list[Found]]]:
    """What tasks found that were run with as many seeds as any."""
    done = [(job, own[0]) for job in jobs if (own := job.results()) is not None]
    seeds = Counter(job.task.name for job, _ in done)
    most = max(seeds.values(), default=0)
    return [own for own in done if seeds[own[0].task.name] == most or not own[0].task.seeded]


def _stated(
    names: Mapping[Cell, str], inputs: Mapping[tuple[str, str], Inputs]
) -> dict[str, dict[str, Any]]:
    """The inputs of rows by their names, without what is empty."""
    rows = {name: inputs[cell[:2]] for cell, name in names.items() if cell[:2] in inputs}
    return {
        name: {key: value for key, value in asdict(own).items() if value}
        for name, own in rows.items()
    }


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
    """What `fedrec reproduce` calls the paper, or the file of the benchmarks that has the item."""
    file = _BENCHMARKS / f"{paper}.toml"
    if paper in PAPERS and (not file.is_file() or item in {one.item for one in find(paper, None)}):
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


def row_names(cells: Mapping[Cell, Any], study: Study) -> dict[Cell, str]:
    """The names of rows: their model, after the data set where the study, of which the cells may be
    a part, has several."""
    several = len(_datasets(study)) > 1 or len({dataset for dataset, _, _ in cells}) > 1
    return {
        (dataset, model, metric): ", ".join(
            filter(None, (dataset if several or not model else "", model))
        )
        for dataset, model, metric in cells
    }


def _datasets(study: Study) -> set[str]:
    return {str(task.options.get("dataset", "")) for task in study.tasks}


def printed(name: str) -> dict[tuple[str, str], float]:
    """What the paper prints, by row and metric as they are named here."""
    study = study_of(name)
    known = published(study.paper, study.item, study.published)
    ours = _datasets(study)
    cells = {cell: value for cell, value in known.items() if cell[0] in ours}
    names = row_names(cells, study)
    return {(names[cell], cell[2]): value for cell, value in cells.items()}


def text_of(tables: Mapping[str, Any]) -> str:
    """The file's text: a line for each row."""
    parts = []
    for name, table in tables.items():
        lines = []
        for key, value in table.items():
            if isinstance(value, dict):
                own = [f"   {_json(row)}: {_json(numbers)}" for row, numbers in value.items()]
                lines.append(f"  {_json(key)}: {{\n" + ",\n".join(own) + "\n  }")
            else:
                lines.append(f"  {_json(key)}: {_json(value)}")
        parts.append(f" {_json(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _of(folder: Path) -> tuple[Study, list[TaskJob]]:
    told = StudyFolder(folder, "study.json", "study").read("study.json")
    if told["quick"]:
        raise RunError(
            f"{folder} is of the small version of a study",
            expected="the folder of a whole study",
            got="one that ran with --quick",
            fix="run the study without --quick, into another folder",
        )
    study = study_of(f"{told['paper']}/{told['item']}")
    seeds = [int(path.name.rpartition("-seed")[2]) for path in (folder / "tasks").glob("*-seed*")]
    return study, study.jobs(folder, max(seeds, default=0) - study.first_seed + 1, quick=False)


def _made(jobs: list[TaskJob]) -> dict[str, str]:
    """Of the last of the tasks, with the commits of all; of those of an earlier version all but the
    commit is known."""
    found = [
        {
            **made(),
            "commit": None,
            **read_json(job.folder / "found.json"),
        }
        for job in jobs
    ]
    last = max(found, key=lambda table: str(table["date"]))
    commits = dict.fromkeys(table["commit"] for table in found if table["commit"])
    known = dict.fromkeys(filter(None, map(_ancestor, commits)))
    return {**{key: last[key] or "" for key in made()}, "commit": ", ".join(known)}


def _ancestor(commit: str) -> str:
    """A commit as those know it who have this checkout: if it is not in its history, such as one of
    a branch that was rebased, the newest one before it that is, with a plus."""
    name = commit.removesuffix("+")
    git = ["git", "-C", str(FILE.parent)]
    asked = [*git, "merge-base", name, "HEAD"], [*git, "rev-parse", name]
    try:
        base, own = (
            subprocess.check_output(words, text=True, stderr=subprocess.DEVNULL).strip()
            for words in asked
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit if base == own else f"{base[: len(name)]}+"


def _short(value: float) -> float | str | None:
    if not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    if value == round(value):
        return round(value)
    small = abs(value) < 10**-3
    return float(f"{value:.{_DECIMALS}g}") if small else round(float(value), _DECIMALS)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
