# SPDX-License-Identifier: Apache-2.0
"""Definition of a study: the tasks that compute a table or figure of a paper, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


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
    """

    dataset: str
    model: str
    metric: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def cell(self) -> tuple[str, str, str]:
        """Dataset, model and metric."""
        return self.dataset, self.model, self.metric


@dataclass(frozen=True)
class Job:
    """One execution of a task.

    Attributes:
        folder: for its run folders; existing runs are continued.
        seed: of the experiments.
        quick: whether to run a small test: synthetic data, two rounds, few users.
    """

    folder: Path
    seed: int
    quick: bool


@dataclass(frozen=True)
class Task:
    """A unit of work of a study.

    Attributes:
        name: also the name of its folder.
        seconds: about how long it takes for one seed, on two cores.
        work: function that runs it and returns the results.
        seeded: whether the results depend on the seed.
        sample: whether `--quick` includes it; one of several similar tasks is enough.
    """

    name: str
    seconds: float
    work: Callable[[Job], Sequence[Found]]
    seeded: bool = True
    sample: bool = True


@dataclass(frozen=True)
class Study:
    """A table or a figure.

    Attributes:
        paper: `privrec`, `dp-vae`, `targeted-dp`, `pnbm` or `upc-sdg`.
        item: such as `table2` or `figure1`.
        title: its caption in short.
        datasets: folders below the data directory that it needs; none for arithmetic.
        tasks: in the order of execution.
        differs: differences from the paper, a sentence each.
        seeds: default number of seeds.
        published: only rows of the paper's table whose data set begins so.
    """

    paper: str
    item: str
    title: str
    datasets: tuple[str, ...]
    tasks: tuple[Task, ...]
    differs: tuple[str, ...] = ()
    seeds: int = 1
    published: str = ""

    @property
    def name(self) -> str:
        """Paper and item."""
        return f"{self.paper} {self.item}"

    def seconds(self, seeds: int) -> float:
        """Estimated duration of the whole study, on two cores."""
        return sum(task.seconds * (seeds if task.seeded else 1) for task in self.tasks)
