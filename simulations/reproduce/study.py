# SPDX-License-Identifier: Apache-2.0
"""What a study is: the tasks that fill a table or a figure of a paper, and what each of them
finds."""

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
        """What it is a value of."""
        return self.dataset, self.model, self.metric


@dataclass(frozen=True)
class Job:
    """One execution of a task.

    Attributes:
        folder: for its run folders; what lies there from before is gone on with.
        seed: of the experiments.
        quick: whether everything is to be small: made-up data, two rounds, few users.
    """

    folder: Path
    seed: int
    quick: bool


@dataclass(frozen=True)
class Task:
    """A part of a study that is done as a whole.

    Attributes:
        name: also the name of its folder.
        seconds: about how long it takes for one seed, on two cores.
        work: does it, and gives what it found.
        seeded: whether other seeds find other numbers.
        sample: whether `--quick` does it; one of many of a kind is enough there.
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
        title: what it shows.
        datasets: folders below the data directory that it needs; none for arithmetic.
        tasks: what there is to do.
        differs: what is not as in the paper, a sentence each.
        seeds: number of seeds, unless the user says another.
    """

    paper: str
    item: str
    title: str
    datasets: tuple[str, ...]
    tasks: tuple[Task, ...]
    differs: tuple[str, ...] = ()
    seeds: int = 1

    @property
    def name(self) -> str:
        """Paper and item."""
        return f"{self.paper} {self.item}"

    def seconds(self, seeds: int) -> float:
        """About how long it takes as a whole, on two cores."""
        return sum(task.seconds * (seeds if task.seeded else 1) for task in self.tasks)
