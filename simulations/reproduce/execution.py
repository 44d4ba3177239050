# SPDX-License-Identifier: Apache-2.0
"""Execution of a study: finished tasks are not repeated, and an interrupted task continues in
its run folders.

    study.json           paper, item, whether quick
    tasks/NAME-seedN/    run folders of a task, and found.json once it is done
    TABLE.csv, TABLE.md  the paper's numbers beside ours
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError, RunError
from fedrec.runtime.atomic_files import write_atomically
from fedrec.runtime.folder_lock import locked
from simulations.reproduce.study import Found, Job, Study, Task

Say = Callable[[str], None]


class StudyFolder:
    """The folder of a study.

    Args:
        path: new, empty, or of the same study.
        study: the study.
        quick: whether to run the small version.

    Raises:
        RunError: there is something else at `path`.
    """

    def __init__(self, path: Path, study: Study, *, quick: bool) -> None:
        self.path = path.expanduser().resolve()
        self.study = study
        self.quick = quick
        about = {"paper": study.paper, "item": study.item, "quick": quick}
        file = self.path / "study.json"
        known = _read(file) if file.is_file() else None
        if known is None and self.path.exists():
            if not self.path.is_dir():
                raise _refusal(self.path, "a file")
            if any(self.path.iterdir()):
                raise _refusal(self.path, "other files")
        if known is not None and known != about:
            raise _refusal(self.path, json.dumps(known))
        if known is None:
            write_atomically(file, json.dumps(about) + "\n")

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder against a second process.

        Raises:
            RunError: another process holds it.
        """
        return locked(
            self.path,
            expected="one process per study",
            got="another process that is at work in it",
            fix="wait for it, or choose another --output",
        )

    def jobs(self, seeds: int) -> list[tuple[Task, Job]]:
        """All tasks with their seeds; a task that does not depend on the seed occurs once."""
        return [
            (task, Job(self.path / "tasks" / f"{task.name}-seed{seed}", seed, self.quick))
            for seed in range(seeds)
            for task in self.study.tasks
            if (task.seeded or seed == 0) and (task.sample or not self.quick)
        ]

    def found(self, job: Job) -> list[Found] | None:
        """The results of a job, if it is done."""
        file = job.folder / "found.json"
        if not file.is_file():
            return None
        try:
            return [Found(**one) for one in _read(file)["found"]]
        except (KeyError, TypeError) as error:
            raise RunError(f"{file} is damaged", got=str(error), fix="remove it") from None

    def seconds(self, job: Job) -> float:
        """Duration of a completed job."""
        return float(_read(job.folder / "found.json").get("seconds", 0.0))

    def keep(self, job: Job, found: Sequence[Found], seconds: float) -> None:
        """Save the results of a job."""
        table = {"found": [asdict(one) for one in found], "seconds": round(seconds, 1)}
        write_atomically(job.folder / "found.json", json.dumps(table, indent=1) + "\n")


def reproduce(
    folder: StudyFolder, seeds: int, *, only: str = "", say: Say = lambda _: None
) -> list[tuple[Job, list[Found]]]:
    """Run the remaining jobs of a study; returns the results of all jobs.

    Args:
        folder: of the study.
        seeds: number of seeds.
        only: run only the task of this name; empty: all.
        say: called with lines about the progress.

    Raises:
        ExperimentError: no task that would run has the name `only`.
        FedrecError: a run failed; earlier results are kept.
    """
    with folder.lock():
        jobs = _selected(folder.jobs(seeds), only)
        left = [(task, job) for task, job in jobs if folder.found(job) is None]
        say(_forecast(folder, jobs, left))
        for number, (task, job) in enumerate(left, 1):
            say(f"{number}/{len(left)}  {task.name}, seed {job.seed}")
            started = time.perf_counter()
            folder.keep(job, list(task.work(job)), time.perf_counter() - started)
    return [(job, found) for _, job in jobs if (found := folder.found(job)) is not None]


def _selected(jobs: list[tuple[Task, Job]], only: str) -> list[tuple[Task, Job]]:
    """The jobs of one task; of all without a name."""
    names = list(dict.fromkeys(task.name for task, _ in jobs))
    if only and only not in names:
        raise ExperimentError(
            f"there is no task {only!r}",
            expected=f"one of {', '.join(names)}",
            got=f"--only {only!r}",
            fix=did_you_mean(only, names),
        )
    return [(task, job) for task, job in jobs if only in ("", task.name)]


def _forecast(folder: StudyFolder, jobs: list[Any], left: list[tuple[Task, Job]]) -> str:
    done = f"{len(jobs) - len(left)} of {len(jobs)} tasks are done"
    if not left:
        return f"{folder.study.name}: {done}"
    seconds = 3.0 * len(left) if folder.quick else sum(task.seconds for task, _ in left)
    return f"{folder.study.name}: {done}, the others take about {duration(seconds)} on two cores"


def duration(seconds: float) -> str:
    """A duration as text."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{file} is damaged", got=str(error), fix="remove it, or take another folder"
        ) from None


def _refusal(path: Path, got: str) -> RunError:
    return RunError(
        f"{path} is not the folder of this study",
        expected="a new or empty folder, or that of the same study (with or without --quick)",
        got=got,
        fix="choose another --output",
    )
