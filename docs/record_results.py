# SPDX-License-Identifier: Apache-2.0
"""Puts the numbers of a study that was run into `simulations/reproduce/results.json`, see
`simulations.reproduce.recorded` and `fill_results.py`."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedrec.errors import RunError
from fedrec.runtime.files import read_json, write_atomically
from simulations.reproduce.recorded import DECIMALS, FILE, command, find, key, published, source_of
from simulations.studies.declaration import Cell, Found, Study, TaskJob, made
from simulations.studies.runs import read_part
from simulations.studies.tables import comparison, differences, draws, inputs_of


def record(folder: Path, file: Path = FILE) -> str:
    """Put a finished study into the file, in place of what the file had of it.

    Args:
        folder: of the study, as `fedrec reproduce ... --output` made it.
        file: the file; made unless it is there.

    Returns:
        The study's name there.

    Raises:
        RunError: a task of the study is not finished, or the folder is of its small version.
    """
    study, jobs = _of(folder)
    left = [job.name for job in jobs if job.results() is None]
    if left or not jobs:
        raise RunError(
            f"the study in {folder} is not finished",
            got=f"{len(left)} of {len(jobs)} tasks are left, such as {', '.join(left[:3])}",
            fix=f"repeat {command(study)} --output {folder}",
        )
    table = entry(study, jobs)
    tables = read_json(file) if file.is_file() else {}
    tables[key(study)] = {"command": command(study, table["seeds"]), **table}
    write_atomically(file, text_of(dict(sorted(tables.items()))))
    return key(study)


def entry(study: Study, jobs: list[TaskJob]) -> dict[str, Any]:
    """The numbers of finished tasks of a study, as they stand in the file, without the command."""
    done = [(job, results[0]) for job in jobs if (results := job.results()) is not None]
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
    stated = inputs_of(result for _, result in drawn)
    inputs = {
        name: {key: value for key, value in asdict(stated[cell[:2]]).items() if value}
        for cell, name in names.items()
        if cell[:2] in stated
    }
    return {
        **_made([job for job, _ in done]),
        "seeds": len({job.seed for job, _ in done}),
        "rows": rows,
        **_not_empty(inputs=inputs, differences=_differences(study, drawn)),
    }


def _not_empty(**tables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: table for name, table in tables.items() if table}


def _differences(
    study: Study, drawn: Iterable[tuple[int, Found]]
) -> dict[str, dict[str, list[Any]]]:
    """Of the rows that a study compares, see `Recorded`."""
    tables: dict[str, dict[str, list[Any]]] = {}
    for row in differences(study.compared, drawn).to_dict("records"):
        numbers = [row[name] for name in ("difference", "low", "high", "t", "draws")]
        tables.setdefault(row["rows"], {})[row["metric"]] = list(map(_short, numbers))
    return tables


def study_of(name: str) -> Study:
    """The study of a name in the file: of a paper, or of `benchmarks/`.

    Raises:
        ExperimentError: there is none.
    """
    paper, _, item = name.partition("/")
    (study,) = find(source_of(paper, item), item)
    return study


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
        for field, value in table.items():
            if isinstance(value, dict):
                rows = [f"   {_json(row)}: {_json(numbers)}" for row, numbers in value.items()]
                lines.append(f"  {_json(field)}: {{\n" + ",\n".join(rows) + "\n  }")
            else:
                lines.append(f"  {_json(field)}: {_json(value)}")
        entries.append(f" {_json(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _of(folder: Path) -> tuple[Study, list[TaskJob]]:
    about = read_part(folder / "study.json")
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
    return float(f"{value:.{DECIMALS}g}") if small else round(float(value), DECIMALS)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
