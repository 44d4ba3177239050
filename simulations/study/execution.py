# SPDX-License-Identifier: Apache-2.0
"""Execution of a study: finished jobs are not repeated, and an interrupted job continues in its run
folders.

    study.json           paper, item, whether quick
    tasks/NAME-seedN/    run folders of a task, and found.json once it is done
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError, RunError
from simulations.study.folder import StudyFolder
from simulations.study.progress import StudyProgress
from simulations.study.study import Study, TaskJob
from simulations.study.tables import duration
from simulations.study.workers import J, JobOutcome, Rounds, Workers, opened


def execute(jobs: Iterator[J], workers: Workers[J], report: Rounds) -> Iterator[JobOutcome[J]]:
    """Perform jobs, as many at a time as there are workers.

    Args:
        jobs: those that are left; the next one is asked for when a worker is free.
        workers: perform them.
        report: called with the rounds of running jobs.

    Yields:
        Each job when it has ended, in the order of their ends.

    Raises:
        FedrecError: a job failed for a reason that affects all jobs, such as missing data.
    """
    running = 0
    while True:
        job = next(jobs, None) if running < workers.size else None
        if job is not None:
            workers.submit(job)
            running += 1
        elif running:
            yield workers.next(report)
            running -= 1
        else:
            return


def folder_of(study: Study, path: Path, *, quick: bool) -> StudyFolder:
    """The folder of a study, which is made unless it is there.

    Args:
        study: the study.
        path: new, empty, or of the same study.
        quick: whether it is of the small version.

    Raises:
        RunError: there is something else at `path`.
    """
    folder = StudyFolder(path, "study.json", "study")
    about = {"paper": study.paper, "item": study.item, "quick": quick}
    if not folder.begun():
        folder.write("study.json", about)
    known = folder.read("study.json")
    if known != about:
        raise RunError(
            f"{folder.path} is not the folder of this study",
            expected=f"{json.dumps(about)} in study.json",
            got=json.dumps(known),
            fix="choose another --output",
        )
    return folder


def selected(jobs: Sequence[TaskJob], only: str) -> list[TaskJob]:
    """The jobs of a task.

    Args:
        jobs: of a study.
        only: the task's name, or a pattern such as `mf-*`; empty: all.

    Raises:
        ExperimentError: no task has such a name, or there is no task at all.
    """
    if not jobs:
        raise ExperimentError(
            "the study has nothing to run",
            expected="at least one task, with --quick one whose `sample` holds",
            got="no task",
            fix="see `tasks` of the study's declaration",
        )
    found = [job for job in jobs if not only or fnmatchcase(job.task.name, only)]
    if not found:
        names = list(dict.fromkeys(job.task.name for job in jobs))
        raise ExperimentError(
            f"there is no task {only!r}",
            expected=f"one of {', '.join(names)}, or a pattern such as '{names[0][:2]}*'",
            got=f"--only {only!r}",
            fix=did_you_mean(only, names),
        )
    return found


def run_study(
    folder: StudyFolder,
    jobs: Sequence[TaskJob],
    *,
    workers: int = 1,
    quiet: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Run the remaining jobs of a study.

    Args:
        folder: of the study.
        jobs: of it.
        workers: number of jobs at a time; more than 1 are Ray actors.
        quiet: whether to print no progress.
        say: called with a line on how long it takes.

    Returns:
        The errors of jobs that failed, by name; the same call repeats them.

    Raises:
        FedrecError: data, engine or disk are at fault; earlier results are kept.
    """
    failures: dict[str, str] = {}
    with folder.lock():
        left = [job for job in jobs if job.found() is None]
        say(_forecast(jobs, left))
        if not left:
            return failures
        progress = StudyProgress(len(jobs), len(jobs) - len(left), word="task", quiet=quiet)
        try:
            with opened(workers, None, "auto") as hands:
                for job, failure in execute(iter(left), hands, progress.on_rounds):
                    progress.on_end(job, failure, "is done")
                    if failure is not None:
                        failures[job.name] = failure
        finally:
            progress.close()
    return failures


def _forecast(jobs: Sequence[TaskJob], left: Sequence[TaskJob]) -> str:
    done = f"{len(jobs) - len(left)} of {len(jobs)} tasks are done"
    if not left:
        return done
    seconds = sum(3.0 if job.quick else job.task.seconds for job in left)
    return f"{done}, the others take about {duration(seconds)} on two cores"
