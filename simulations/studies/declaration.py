# SPDX-License-Identifier: Apache-2.0
"""Studies that compute a table or figure: their tasks, declaration in TOML, jobs and quick
versions."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import platform
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from fedrec.components.registry import BASELINE, resolve
from fedrec.data.reader import data_directory
from fedrec.errors import ExperimentError, unknown, unreadable
from fedrec.experiment.schema import Experiment, load, read
from fedrec.runs.ids import commit, installed_version
from fedrec.runtime.files import number, read_json, read_toml, write_json
from server.callbacks import Callback

# Templates with `{key}` or `{key:format}`, in Python's format language.

_KEY = re.compile(r"\{([\w-]+)(?::([^{}]*))?\}")
_WIDE = re.compile(r"\d{4}")  # a width or precision that no text needs


def _filled(value: Any, texts: Mapping[str, Any], used: set[str] | None = None) -> Any:
    """Replace all `{key}` in the texts of a value, also within tables and lists; a text that is
    only `{key}` becomes the key's value.

    Args:
        value: any value of a TOML file.
        texts: values by key; other keys are not replaced.
        used: receives the keys that occur.
    """
    if isinstance(value, Mapping):
        return {
            str(_filled(key, texts, used)): _filled(entry, texts, used)
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [_filled(entry, texts, used) for entry in value]
    if not isinstance(value, str):
        return value
    keys = {match[1] for match in _KEY.finditer(value)} & texts.keys()
    if used is not None:
        used |= keys
    alone = _KEY.fullmatch(value)
    if alone and alone[1] in keys and alone[2] is None:
        return texts[alone[1]]
    return _KEY.sub(lambda match: _text(match, texts), value)


def _text(match: re.Match[str], texts: Mapping[str, Any]) -> str:
    key, form = match.groups()
    if _WIDE.search(form or ""):
        raise ValueError(f"the width or precision of {match[0]} is too large")
    return format(texts[key], form or "") if key in texts else match[0]


# Small versions of experiments for `--quick`: the same components on synthetic data, with
# meaningless numbers.

DATA = {
    "name": "synthetic",
    "users": 60,
    "items": 50,
    "mean-interactions": 14,
    "min-interactions": 8,
}
_MOST: dict[str, int] = {
    "cohort": 6,
    "keep": 6,  # Krum's number of updates
    "items": 20,
    "factors": 2,
    "steps": 2,
    "epochs": 1,
    "iterations": 1,
    "rounds": 1,
}
_ABSENT = ("eras", "item.c")  # features of MovieLens-1M and of Frappe


def shrunk(table: Mapping[str, Any]) -> dict[str, Any]:
    """Shrink an experiment's table to about a second, with the same model, step, strategy, noise
    and baselines."""
    small = _reduced(table)
    small["dataset"] = dict(DATA)
    split = small.get("split", {})
    small["split"] = {key: split[key] for key in split if key != "folder"}
    if split.get("name") == "published":  # needs files, as shipped folds do
        small["split"] = {"name": "ratio"}
    if small.get("rounds"):
        small["rounds"] = 2
        small["step"] = {**small.get("step", {}), "epochs": 1}
    if small.get("perturb", {}).get("name") == "upc-sdg":
        perturb = small["perturb"]
        perturb["embeddings"] = {**perturb.get("embeddings", {}), "epochs": 1}
    evaluation = {**small.get("evaluation", {}), "every": 0, "final-users": 10}
    evaluation["baselines"] = [_small_baseline(entry) for entry in evaluation.get("baselines", [])]
    return {**small, "evaluation": evaluation}


def _reduced(value: Any) -> Any:
    """A value with numbers of at most `_MOST` in its tables, and without settings for parameters of
    features that synthetic items do not have."""

    if isinstance(value, Mapping):
        return {
            key: min(inner, _MOST[key])
            if key in _MOST and isinstance(inner, int)
            else _reduced(inner)
            for key, inner in value.items()
            if not _of_absent(key)
        }
    if isinstance(value, list):
        return [_reduced(entry) for entry in value if not _of_absent(entry)]
    return value


def _of_absent(name: object) -> bool:
    return any(feature in str(name) for feature in _ABSENT)


def _small_baseline(entry: str | Mapping[str, Any]) -> dict[str, Any]:
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    fields = resolve(BASELINE, str(options["name"])).Config.model_fields
    return {**options, "epochs": 1} if "epochs" in fields else options


Cell = tuple[str, str, str]
"""Dataset, model, metric."""


@dataclass(frozen=True)
class Found:
    """A measured number.

    Attributes:
        dataset: name in the paper.
        model: row of the table, or curve of the figure.
        metric: name in the paper.
        value: the number.
        low: lower end of a 95 % interval over the users of this run, if any.
        high: its upper end.
        lower_is_better: whether smaller values are better.
        least: smallest possible value; None: no limit.
        most: largest possible value; None: no limit.
        inputs: the system's training inputs, as JSON values of the fields of `Inputs`; None: not
            stated.
    """

    dataset: str
    model: str
    metric: str
    value: float
    low: float | None = None
    high: float | None = None
    lower_is_better: bool = False
    least: float | None = None
    most: float | None = None
    inputs: Mapping[str, Any] | None = None

    @property
    def cell(self) -> Cell:
        """Cell of the number in a table."""
        return self.dataset, self.model, self.metric


@dataclass(frozen=True)
class Task:
    """A unit of work of a study.

    Attributes:
        name: also the name of its folder.
        seconds: estimated duration of one seed on two cores.
        measure: function that returns the numbers from a `TaskJob` and the options, or its name,
            `"module:function"`.
        options: keyword arguments of the measure.
        seeded: whether the results depend on the seed.
        sample: whether `--quick` includes it; one of several similar tasks is enough.
        variables: keys of `options` that need not be arguments: those used by templates or shared
            by all tasks of the study.
    """

    name: str
    seconds: float
    measure: str | Callable[..., Iterable[Found]]
    options: Mapping[str, Any] = field(default_factory=dict)
    seeded: bool = True
    sample: bool = True
    variables: frozenset[str] = frozenset()

    def resolved(self) -> Callable[[TaskJob], Iterable[Found]]:
        """Bind the options to the measure.

        Raises:
            ExperimentError: the measure does not have an option.
        """
        measure = resolve_name(self.measure) if isinstance(self.measure, str) else self.measure
        names = inspect.signature(measure).parameters
        for key in self.options.keys() - names - self.variables:
            known = list(names)[1:]
            expected = f"one of {', '.join(known)} in the task {self.name!r}"
            raise unknown("key", key, known, expected)
        return partial(measure, **{k: v for k, v in self.options.items() if k in names})


@dataclass(frozen=True)
class Job(ABC):
    """A unit of work, which is sent to other processes.

    Attributes:
        folder: its folder, whose name is unique in the study.
    """

    folder: Path

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.folder.name

    @abstractmethod
    def perform(self, callbacks: Sequence[Callback]) -> None:
        """Do the work, or the remaining part, with callbacks of its runs."""


@dataclass(frozen=True)
class TaskJob(Job):
    """One execution of a task; existing runs in its folder are continued, and `found.json` has the
    numbers.

    Attributes:
        seed: seed of the experiments.
        quick: whether to run a small test: synthetic data, two rounds, few users.
        task: the task to execute.
        callbacks: callbacks of its runs.
    """

    seed: int
    quick: bool
    task: Task
    callbacks: Sequence[Callback] = ()

    @property
    def run_path(self) -> Path:
        """Folder of its run, if it has only one."""
        return self.folder / "run"

    def perform(self, callbacks: Sequence[Callback]) -> None:
        """Do the work, or the remaining part, and save the results."""
        started = time.perf_counter()
        numbers = list(self.task.resolved()(replace(self, callbacks=callbacks)))
        seconds = round(time.perf_counter() - started, 1)
        table = {"found": [asdict(number) for number in numbers], "seconds": seconds, **made()}
        write_json(self.folder / "found.json", table)

    def table(self, source: str | Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
        """Load the table of an experiment, shrunk if `quick`, and replace `{data-directory}` and
        `{seed}`."""
        texts: dict[str, Any] = {"seed": self.seed}
        if not self.quick:
            texts["data-directory"] = str(data_directory())
        table = _filled(read(source, overrides), texts)
        return shrunk(table) if self.quick else table

    def experiment(
        self, source: str | Mapping[str, Any], overrides: Sequence[str] = ()
    ) -> Experiment:
        """Load an experiment with the job's seed, to run in this process."""
        return load(self.table(source, overrides), [f"seed={self.seed}", "engine.name=serial"])

    def results(self) -> tuple[list[Found], float] | None:
        """Results and seconds of a finished job; None for others.

        Raises:
            RunError: the results are damaged.
        """
        file = self.folder / "found.json"
        if not file.is_file():
            return None
        try:
            table = read_json(file)
            return [_found(entry) for entry in table["found"]], float(table.get("seconds", 0.0))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unreadable(file, error, fix="remove it") from None


def _found(table: Mapping[str, Any]) -> Found:
    """Read a number from JSON."""
    numbers = {
        name: number(table[name])
        for name in ("value", "low", "high", "least", "most")
        if table.get(name) is not None
    }
    return Found(**{**table, "value": math.nan, **numbers})


def made() -> dict[str, Any]:
    """Provenance of numbers: code version, date and class of machine."""
    return {
        "fedrec": installed_version("fedrec"),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


@dataclass(frozen=True)
class Study:
    """A study: the tasks of a table or a figure.

    Attributes:
        paper: `privrec`, `dp-vae`, `targeted-dp`, `pnbm` or `upc-sdg`, or the name of a file.
        item: for example `table2` or `figure1`.
        title: short caption.
        tasks: tasks in the order of execution.
        differs: differences from the paper, one sentence each.
        seeds: default number of seeds.
        first_seed: the first seed.
        published: prefix of the data sets whose rows of the paper's table are included.
        compared: rows whose differences are tested, paired by fold or seed: two rows (second minus
            first), or four, for a difference of two differences.
        best: whether the table is sorted by the results, best first.
    """

    paper: str
    item: str
    title: str
    tasks: tuple[Task, ...]
    differs: tuple[str, ...] = ()
    seeds: int = 1
    first_seed: int = 0
    published: str = ""
    compared: tuple[tuple[str, ...], ...] = ()
    best: bool = False

    @property
    def name(self) -> str:
        """Name made of the paper and the item."""
        return f"{self.paper} {self.item}"

    def seconds(self, seeds: int) -> float:
        """Estimated duration of the whole study, on two cores."""
        return sum(task.seconds * (seeds if task.seeded else 1) for task in self.tasks)

    def jobs(self, path: Path, seeds: int, *, quick: bool) -> list[TaskJob]:
        """Jobs of all tasks and seeds; a task that does not depend on the seed has one job.

        Args:
            path: folder of the study.
            seeds: number of seeds.
            quick: whether to run the small version.
        """
        return [
            TaskJob(path / "tasks" / f"{task.name}-seed{seed}", seed, quick, task)
            for seed in range(self.first_seed, self.first_seed + seeds)
            for task in self.tasks
            if (task.seeded or seed == self.first_seed) and (task.sample or not quick)
        ]


# Studies that are declared in a TOML file, a section each:
#
#     [sets]                          # lists of overrides, `"@quiet"` in a `set`
#     quiet = ["evaluation.every=0"]
#
#     [defaults]                      # of all sections
#     metrics = {"hits@10" = "Hits@10"}
#
#     [table2]
#     title = "Comparison of systems"
#     tasks = [
#         {name = "mf", experiment = "mf-ml1m", set = ["@quiet"], row = "MF", seconds = 30},
#         {name = "lr-{lr:g}", vary = {lr = [0.1, 0.5]}, set = ["strategy.server-lr={lr}"], ...},
#     ]
# A section's keys that are not fields of `Study` apply to all its tasks; `like` copies those of
# another section, and `"@name"` in the list of tasks inserts those of `[parts]`. `vary` makes a
# task for each
# combination of values, `cases` one for each table of keys; `set` adds to the outer overrides.
# `{key}` and `{key:format}` in texts are replaced by the value of a key of the task, `{varied}` by
# all varied keys and values, as TOML; a text that is `{key}` alone becomes the value itself. In an
# experiment `{seed}` is the seed of the run and `{data-directory}` the folder of the data. A task's
# other keys are the arguments of its `measure`, by default `simulations.studies.runs:measure`.

_RUN = "simulations.studies.runs:measure"
_OF_TASK = ("seconds", "slower", "measure", "seeded", "sample")
Table = dict[str, Any]


def declared(file: Path) -> Iterator[Study]:
    """Read the studies of a file, in its order; `paper` is the file's name.

    Raises:
        ExperimentError: the file is missing or not TOML, or a study is incomplete.
    """
    document = read_toml(file, ExperimentError)
    defaults = document.pop("defaults", {})
    names = _Names(document.pop("sets", {}), document.pop("parts", {}))

    def section(item: str) -> Table:
        table = _named(document, item)
        return {**(section(table["like"]) if "like" in table else defaults), **table}

    for item in document:
        try:
            yield _study(file.stem, item, section(item), names)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ExperimentError(
                f"{file}: invalid study {item!r}",
                expected="title and tasks, and for each task name and seconds",
                got=f"{type(error).__name__}: {error}",
                fix="see docs/how-to.md, Studies of your own",
            ) from None


class _Names(NamedTuple):
    """Named lists of overrides and tasks of a file."""

    sets: Mapping[str, list[str]]
    tasks: Mapping[str, Any]

    def overrides(self, texts: list[str]) -> list[str]:
        """Overrides with the named lists inserted for `@name`."""
        lists = [
            self.overrides(_named(self.sets, text[1:])) if text.startswith("@") else [text]
            for text in texts
        ]
        return list(itertools.chain.from_iterable(lists))


def _named(tables: Mapping[str, Any], name: str) -> Any:
    if name not in tables:
        raise unknown("name", name, tables)
    return tables[name]


def _study(paper: str, item: str, section: Table, names: _Names) -> Study:
    section.pop("like", None)
    about = {"title": section.pop("title"), "published": section.pop("published", "")}
    compared = _expanded(section.pop("compared", []), names)
    further = {
        "differs": tuple(section.pop("differs", ())),
        "seeds": section.pop("seeds", 1),
        "first_seed": section.pop("first-seed", 0),
        "best": section.pop("best", False),
        "compared": tuple(tuple(_filled(rows["rows"], rows)) for rows in compared),
    }
    cases = {"cases": section.pop("tasks")}
    tasks = [_task(table, names, frozenset(section)) for table in _expanded(section | cases, names)]
    texts = {key: _filled(value, section) for key, value in about.items()}
    return Study(paper, item, tasks=tuple(tasks), **texts, **further)


def _expanded(table: Table | list[Table], names: _Names) -> Iterator[Table]:
    """Expand a table with `cases` or `vary` into its tables."""
    rest = {"cases": table} if isinstance(table, list) else dict(table)
    if "cases" in rest:
        for case in rest.pop("cases"):
            entry = _named(names.tasks, case[1:]) if isinstance(case, str) else case
            overrides = [*rest.get("set", []), *entry.get("set", [])]
            yield from _expanded({**rest, **entry, "set": overrides}, names)
    elif "vary" in rest:
        varied = _filled(rest.pop("vary"), rest)
        for values in itertools.product(*varied.values()):
            point = dict(zip(varied, values, strict=True))
            text = ", ".join(f"{key}={json.dumps(value)}" for key, value in point.items())
            yield from _expanded({**rest, **point, "varied": text, "varying": point.keys()}, names)
    else:
        yield rest


def _task(table: Table, names: _Names, shared: frozenset[str]) -> Task:
    overrides = names.overrides(table.pop("set"))
    if overrides:
        table["set"] = overrides
    used = set[str]()
    varying = table.pop("varying", ())
    table = _filled(table, table, used)
    used.update(varying if "varied" in used else ())
    sample = table.get("sample", True)
    if not isinstance(sample, bool):  # required values of the task's keys
        sample = any(values.items() <= table.items() for values in sample)
    return Task(
        table["name"].lower(),
        float(table["seconds"]) * table.get("slower", 1),
        table.get("measure", _RUN),
        {key.replace("-", "_"): value for key, value in table.items() if key not in _OF_TASK},
        table.get("seeded", True),
        sample,
        frozenset(key.replace("-", "_") for key in used | shared | {"name", "varied"}),
    )
