# SPDX-License-Identifier: Apache-2.0
"""Definition of a study: the tasks that compute a table or figure, and their results."""

from __future__ import annotations

import inspect
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.loading import load, read
from fedrec.experiment.schema import Experiment
from fedrec.runs.environment import commit, installed_version
from fedrec.runtime.atomic_files import write_atomically
from fedrec.runtime.strict_json import finite, number
from fedrec.runtime.text_files import read_json
from server.callbacks.base import Callback
from simulations.study.job import Job
from simulations.study.quick import shrunk
from simulations.study.templates import filled

Cell = tuple[str, str, str]
"""Dataset, model, metric."""


@dataclass(frozen=True)
class Found:
    """One number.

    Attributes:
        dataset: as the paper calls it.
        model: row of the table, or curve of the figure.
        metric: as the paper calls it.
        value: the number.
        low: lower end of a 95 % interval over the users of this run, where there is one.
        high: its upper end.
        lower_is_better: whether the smaller value is the better one.
        least: smallest value that the metric can have; None: any.
        most: largest value, likewise.
        inputs: what the system had to learn from, the fields of `Inputs` as JSON values; None: not
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
        """Its place in a table."""
        return self.dataset, self.model, self.metric


@dataclass(frozen=True)
class Task:
    """A unit of work of a study.

    Attributes:
        name: also the name of its folder.
        seconds: about how long it takes for one seed, on two cores.
        measure: function of a `TaskJob` and the options that gives the numbers, or its name,
            `"module:function"`.
        options: its further arguments, by name.
        seeded: whether the results depend on the seed.
        sample: whether `--quick` includes it; one of several similar tasks is enough.
        variables: keys of `options` that need not be arguments: those that templates have used, and
            those that hold for all tasks of the study.
    """

    name: str
    seconds: float
    measure: str | Callable[..., Iterable[Found]]
    options: Mapping[str, Any] = field(default_factory=dict)
    seeded: bool = True
    sample: bool = True
    variables: frozenset[str] = frozenset()

    def work(self, job: TaskJob) -> list[Found]:
        """The numbers.

        Raises:
            ExperimentError: an option is not one of the measure's.
            FedrecError: a run failed.
        """
        return list(self.resolved()(job))

    def resolved(self) -> Callable[[TaskJob], Iterable[Found]]:
        """The measure with its options.

        Raises:
            ExperimentError: an option is not one of the measure's.
        """
        measure = resolve_name(self.measure) if isinstance(self.measure, str) else self.measure
        known = inspect.signature(measure).parameters
        for key in self.options.keys() - known - self.variables:
            raise ExperimentError(
                f"the task {self.name!r} has an unknown key {key!r}",
                expected="one of " + ", ".join(list(known)[1:]),
                got=key,
                fix=did_you_mean(key, known),
            )
        return partial(measure, **{k: v for k, v in self.options.items() if k in known})


@dataclass(frozen=True)
class TaskJob(Job):
    """One execution of a task.

    Attributes:
        folder: for its run folders and `found.json`; existing runs are continued.
        seed: of the experiments.
        quick: whether to run a small test: synthetic data, two rounds, few users.
        task: what is executed.
        callbacks: of its runs.
    """

    folder: Path
    seed: int
    quick: bool
    task: Task
    callbacks: Sequence[Callback] = ()

    @property
    def name(self) -> str:
        """Task and seed."""
        return self.folder.name

    @property
    def run_path(self) -> Path:
        """The folder of its only run, where it has one."""
        return self.folder / "run"

    def perform(self, callbacks: Sequence[Callback]) -> None:
        """Do the work, and save the results."""
        started = time.perf_counter()
        found = self.task.work(replace(self, callbacks=callbacks))
        seconds = round(time.perf_counter() - started, 1)
        table = {"found": [asdict(one) for one in found], "seconds": seconds, **made()}
        text = json.dumps(finite(table), indent=1, allow_nan=False)
        write_atomically(self.folder / "found.json", text + "\n")

    def table(self, source: str | Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
        """The table of an experiment, small if quick. `{data-directory}` and `{seed}` in it are
        replaced."""
        from fedrec.data.reader import data_directory

        place = {} if self.quick else {"data-directory": str(data_directory())}
        table = filled(read(source, overrides), {"seed": self.seed, **place})
        return shrunk(table) if self.quick else table

    def experiment(
        self, source: str | Mapping[str, Any], overrides: Sequence[str] = ()
    ) -> Experiment:
        """An experiment with the job's seed, in this process."""
        return load(self.table(source, overrides), [f"seed={self.seed}", "engine.name=serial"])

    def found(self) -> tuple[list[Found], float] | None:
        """The results and their seconds, if the job is done.

        Raises:
            RunError: they are damaged.
        """
        file = self.folder / "found.json"
        if not file.is_file():
            return None
        try:
            table = read_json(file)
            return [_found(one) for one in table["found"]], float(table.get("seconds", 0.0))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file} is damaged", got=str(error), fix="remove it") from None


def _found(table: Mapping[str, Any]) -> Found:
    """One number of a task, from JSON."""
    numbers = {
        name: number(table[name])
        for name in ("value", "low", "high", "least", "most")
        if table.get(name) is not None
    }
    return Found(**{**table, "value": math.nan, **numbers})


def made() -> dict[str, Any]:
    """With what code, when and on what class of machine numbers were made."""
    return {
        "fedrec": installed_version("fedrec"),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


@dataclass(frozen=True)
class Study:
    """A table or a figure.

    Attributes:
        paper: `privrec`, `dp-vae`, `targeted-dp`, `pnbm` or `upc-sdg`, or the name of a file.
        item: such as `table2` or `figure1`.
        title: its caption in short.
        datasets: folders below the data directory that it needs; none for arithmetic.
        tasks: in the order of execution.
        differs: differences from the paper, a sentence each.
        seeds: default number of seeds.
        first_seed: the first of them.
        published: only rows of the paper's table whose data set begins so.
        compared: rows whose differences are tested, paired by fold or seed: two rows, of which the
            second may be higher, or four, for a difference of two differences.
        best: whether the table is in the order of the results, best first.
    """

    paper: str
    item: str
    title: str
    datasets: tuple[str, ...]
    tasks: tuple[Task, ...]
    differs: tuple[str, ...] = ()
    seeds: int = 1
    first_seed: int = 0
    published: str = ""
    compared: tuple[tuple[str, ...], ...] = ()
    best: bool = False

    @property
    def name(self) -> str:
        """Paper and item."""
        return f"{self.paper} {self.item}"

    def seconds(self, seeds: int) -> float:
        """Estimated duration of the whole study, on two cores."""
        return sum(task.seconds * (seeds if task.seeded else 1) for task in self.tasks)

    def jobs(self, path: Path, seeds: int, *, quick: bool) -> list[TaskJob]:
        """All tasks with their seeds; a task that does not depend on the seed occurs once.

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
