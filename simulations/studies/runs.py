# SPDX-License-Identifier: Apache-2.0
"""Runs of a study: execution, workers, folder and progress."""

import logging
import math
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from fedrec.errors import (
    DataError,
    EngineError,
    ExperimentError,
    FedrecError,
    RunError,
    unknown,
    unreadable,
)
from fedrec.evaluation.tables import Metrics, lower_is_better
from fedrec.experiment.schema import Experiment, marked
from fedrec.report.inputs import system_inputs
from fedrec.runs.folder import Result, RunFolder, locked
from fedrec.runtime.files import read_json, require_new_folder, write_json
from server.callbacks import Callback, Progress
from simulations import runner
from simulations.studies.declaration import Found, Job, Study, TaskJob
from simulations.studies.tables import duration

# Runs of a study, each in its own folder, and their numbers.

_CHECKPOINTS = 20  # minimum per run
_NORMAL = 1.959964  # quantile of 95 % intervals over users
SYSTEM = ""
"""Label of the experiment's federated system among those of its baselines."""


def run_once(experiment: Experiment, folder: Path, callbacks: Sequence[Callback] = ()) -> RunFolder:
    """Run an experiment, or continue or reuse the run in a folder.

    Raises:
        RunError: the folder holds a run of another experiment, for example with settings of an
            earlier version.
        FedrecError: see `simulations.runner.run`.
    """
    if not (folder / "run.json").is_file():
        return RunFolder(runner.run(experiment, output=folder, callbacks=callbacks).folder)
    run = RunFolder(folder)
    settled = runner.settle(runner.with_private_popularity(experiment), run.experiment.engine)
    if run.experiment.digest() != settled.digest():
        before = run.experiment.table()
        asked = settled.table()
        other = sorted(k for k in before.keys() | asked.keys() if before.get(k) != asked.get(k))
        raise RunError(
            f"{folder} holds a run with different settings",
            got=f"{', '.join(other)} differ from its experiment.toml",
            fix=f"fedrec resume {quote(str(folder))} --set KEY=VALUE, remove it, or choose another"
            " --output",
        )
    runner.resume(folder, callbacks=callbacks)
    return run


def finished(
    job: TaskJob, source: str | Mapping[str, Any], overrides: Sequence[str] = ()
) -> Result:
    """Result of a job's run, which is read if finished, else started or continued from its newest
    checkpoint; with at least twenty checkpoints, so that a killed study loses little."""
    experiment = job.experiment(source, overrides)
    every = min(experiment.checkpoint.every, max(1, experiment.rounds // _CHECKPOINTS))
    checkpoint = experiment.checkpoint.model_copy(update={"every": every})
    saved = experiment.model_copy(update={"checkpoint": checkpoint})
    return run_once(saved, job.run_path, job.callbacks).read_result()


def measure(
    job: TaskJob,
    experiment: str | Mapping[str, Any],
    dataset: str,
    metrics: Mapping[str, str],
    row: str | None = None,
    rows: Mapping[str, str] | None = None,
    set: Sequence[str] = (),
    groups: Sequence[str] = (),
    above: str | None = None,
) -> Iterator[Found]:
    """Compute the numbers of one run.

    Args:
        job: job of the task.
        experiment: the name of a shipped experiment, or a table.
        dataset: name in the paper.
        metrics: the paper's metric by ours.
        row: row of the paper's table for the federated system.
        rows: row of the paper's table by our label of a system (`SYSTEM`, or a baseline).
        set: overrides of the experiment.
        groups: groups of users with separate rows.
        above: a baseline for a comparison paired by user.
    """
    result = finished(job, experiment, set)
    named = {**({} if row is None else {SYSTEM: row}), **(rows or {})}
    yield from values(result, dataset, named, metrics)
    system = named.get(SYSTEM, "")
    for group in result.groups.index.intersection(list(groups)):
        for ours, theirs in metrics.items():
            yield Found(
                dataset, f"{system}, {group} users", theirs, float(result.groups.at[group, ours])
            )
    if above is not None:
        label = f"{system}, above {named.get(above, above)} by user"
        for ours, theirs in metrics.items():
            yield Found(dataset, label, theirs, *gap(result, above, ours))


def values(
    result: Result, dataset: str, rows: Mapping[str, str], metrics: Mapping[str, str]
) -> Iterator[Found]:
    """Numbers of a run, with intervals over its users."""
    experiment = result.experiment
    ranges = Metrics(experiment.task, experiment.evaluation).ranges
    inputs = system_inputs(result)
    for label, row in rows.items():
        row_inputs = inputs.get(marked(experiment) if label == SYSTEM else label)
        stated = None if row_inputs is None else asdict(row_inputs)
        means = result.metrics if label == SYSTEM else result.baselines.get(label, {})
        users = result.users if label == SYSTEM else result.baseline_users.get(label)
        for ours, theirs in metrics.items():
            if ours in means:
                interval = _interval(means[ours], users, ours)
                lower = lower_is_better(ours, experiment.evaluation)
                least, most = ranges.get(ours, (None, None))
                yield Found(dataset, row, theirs, *interval, lower, least, most, stated)


def gap(result: Result, baseline: str, metric: str) -> tuple[float, float | None, float | None]:
    """Difference between a system and one of its run's baselines, paired by user.

    Returns:
        Mean of the differences over the users, and the ends of its 95 % interval.
    """
    users = result.baseline_users[baseline]
    apart = result.users[metric] - users.loc[result.users.index, metric]
    return _interval(float(apart.mean()), pd.DataFrame({metric: apart}), metric)


def _interval(
    mean: float, users: pd.DataFrame | None, metric: str
) -> tuple[float, float | None, float | None]:
    """Mean over users and the ends of its normal 95 % interval; None for metrics without such a
    mean."""
    if users is None or metric not in users:
        return mean, None, None
    column = np.array(list(users[metric].dropna()), dtype=float)
    pooled = metric == "rmse" or "rows" in users  # errors are means over rows, not over users
    if pooled or len(column) < 2:
        return mean, None, None
    half = _NORMAL * float(np.std(column, ddof=1)) / math.sqrt(len(column))
    return mean, mean - half, mean + half


# Execution of jobs: sequentially in this process, or in parallel as Ray tasks, with equal numbers.


J = TypeVar("J", bound=Job)


def execute(
    jobs: Iterator[J],
    failures: dict[str, str],
    *,
    total: int,
    done: int,
    word: str = "run",
    describe: Callable[[J], str] = lambda job: "is done",
    workers: int = 1,
    device: str = "auto",
    quiet: bool = True,
) -> Iterator[J]:
    """Perform jobs sequentially or on Ray, and print a line on standard error when one ends.

    Args:
        jobs: remaining jobs; the next one is taken when a worker is free.
        failures: receives the errors of failed jobs by name.
        total: number of all jobs.
        done: number of jobs that were finished before.
        word: name of a job in the lines.
        describe: returns a few words about a finished job.
        workers: number of jobs at a time; 1: in this process.
        device: device of the runs; Ray tasks share the GPUs.
        quiet: whether to print no progress.

    Yields:
        Each job when it ends.

    Raises:
        EngineError: Ray cannot be started.
        FedrecError: a job failed for a reason that affects all jobs, such as missing data.
    """

    def tell(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr)

    started = time.monotonic()
    tell(f"{done}/{total} {word}s are done")
    ended = _on_ray(jobs, workers, device) if workers > 1 else _here(jobs, quiet)
    for count, (job, failure) in enumerate(ended, 1):
        if failure is not None:
            failures[job.name] = failure
        words = describe(job) if failure is None else f"failed: {failure.splitlines()[0]}"
        elapsed = time.monotonic() - started
        left = elapsed / count * (total - done - count)
        tell(
            f"{word} {done + count}/{total}  {job.name}  {words}"
            f"  elapsed {elapsed:.0f} s, left {left:.0f} s"
        )
        yield job


def _attempt(job: Job, callbacks: Sequence[Callback] = ()) -> str | None:
    """Perform a job, and return an error instead of stopping other jobs; None if it finished.

    Raises:
        FedrecError: an error of data, engine or disk, which affects all jobs.
    """
    try:
        job.perform(callbacks)
    except (DataError, EngineError, RunError):
        raise
    except FedrecError as error:
        return error.text()
    except Exception as error:  # of a plug-in; its traceback is logged
        logging.getLogger("fedrec").warning("%s: %s", job.name, traceback.format_exc())
        return f"{type(error).__name__}: {error}"
    return None


def _here(jobs: Iterator[J], quiet: bool) -> Iterator[tuple[J, str | None]]:
    for job in jobs:
        with closing(Progress()) as progress:
            failure = _attempt(job, [] if quiet else [progress])
        yield job, failure


def _on_ray(jobs: Iterator[J], workers: int, device: str) -> Iterator[tuple[J, str | None]]:
    import ray

    from simulations.engines.ray import connected

    with connected(None, workers):
        gpus = ray.cluster_resources().get("GPU", 0.0) if device != "cpu" else 0.0
        options = {"num_cpus": 1, "num_gpus": min(1.0, gpus / workers), "max_retries": 0}
        task = ray.remote(**options)(_attempt)
        running: dict[Any, J] = {}
        while True:
            job = next(jobs, None) if len(running) < workers else None
            if job is not None:
                running[task.remote(job)] = job
                continue
            if not running:
                return
            (ended, *_), _ = ray.wait(list(running))
            job = running.pop(ended)
            yield job, _outcome(job, ended)


def _outcome(job: Job, task: Any) -> str | None:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(task)
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, FedrecError):
            raise cause from None
        raise EngineError(
            f"run {job.name} was lost",
            got=f"{type(error).__name__}: {error}",
            fix="repeat the command, with fewer --workers if memory was short; finished work is"
            " reused",
        ) from None


def open_folder(
    path: Path,
    name: str,
    kind: str,
    asked: Mapping[str, Any],
    free: Sequence[str] = (),
    *,
    secret: bool = False,
) -> Path:
    """Create the folder of a study, or check that it is that of the same study.

    Args:
        path: the folder.
        name: name of the JSON file that identifies the study.
        kind: kind of study for errors, such as `sweep`.
        asked: what identifies the study.
        free: keys of it that may differ.
        secret: whether only the owner can read a new folder.

    Returns:
        Its absolute path.

    Raises:
        RunError: the folder has another study, or other contents.
    """
    path = path.expanduser().resolve()
    if not (path / name).is_file():
        require_new_folder(path, expected=f"a new or empty folder, or that of the same {kind}")
        if secret:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        write_json(path / name, asked)
    before = read_part(path / name)
    if not isinstance(before, dict):
        raise damaged(path / name, "not a table")
    other = [key for key in asked if before.get(key) != asked[key] and key not in free]
    if other:
        raise RunError(
            f"{path} holds another {kind}",
            got=f"{', '.join(other)} differ from its {name}",
            fix="choose another --output, or give the same experiment and options",
        )
    return path


def read_part(file: Path) -> Any:
    """Read a JSON file of a study.

    Raises:
        RunError: the file is damaged.
    """
    try:
        return read_json(file)
    except (OSError, ValueError) as error:
        raise damaged(file, error) from None


def damaged(file: Path, got: object) -> RunError:
    """Create the error for a damaged file of a study."""
    return unreadable(file, got, "restore it from a backup; the run folders are complete")


# Execution of a study: finished jobs are skipped, interrupted jobs continue in their run folders.
#
#     study.json           paper, item, whether quick
#     tasks/NAME-seedN/    run folders of a task, and found.json once it is done


def folder_of(study: Study, path: Path, *, quick: bool) -> Path:
    """Open the folder of a study, or create it, and return its absolute path.

    Args:
        study: the study.
        path: a new or empty folder, or that of the same study.
        quick: whether it is the small version.

    Raises:
        RunError: `path` has other contents.
    """
    asked = {"paper": study.paper, "item": study.item, "quick": quick}
    return open_folder(path, "study.json", "study", asked)


def selected(jobs: Sequence[TaskJob], only: str) -> list[TaskJob]:
    """Select the jobs of a task.

    Args:
        jobs: jobs of a study.
        only: the task's name, or a pattern such as `mf-*`; empty: all.

    Raises:
        ExperimentError: the name is unknown, or the study has no tasks.
    """
    names = list(dict.fromkeys(job.task.name for job in jobs))
    if not names:
        fix = "declare `tasks`, for --quick one without `sample = false`"
        raise ExperimentError("the study has no tasks to run", fix=fix)
    chosen = [job for job in jobs if not only or fnmatchcase(job.task.name, only)]
    if not chosen:
        pattern = f"one of {', '.join(names)}, or a pattern such as '{names[0][:2]}*'"
        raise unknown("task", only, names, pattern)
    return chosen


def run_study(
    folder: Path, jobs: Sequence[TaskJob], *, workers: int = 1, name: str | None = None
) -> dict[str, str]:
    """Run the remaining jobs of a study.

    Args:
        folder: folder of the study.
        jobs: jobs of the study.
        workers: number of jobs at a time; more than 1 are Ray tasks.
        name: name of the study, before a line about the duration and other progress on standard
            error; None: nothing is printed.

    Returns:
        Errors of failed jobs by name; the same call repeats these jobs.

    Raises:
        FedrecError: an error of data, engine or disk; earlier results remain.
    """
    failures: dict[str, str] = {}
    with locked(folder):
        left = [job for job in jobs if job.results() is None]
        seconds = sum(3.0 if job.quick else job.task.seconds for job in left)
        done = len(jobs) - len(left)
        more = f", the others take about {duration(seconds)} on two cores" if left else ""
        if name is not None:
            print(f"{name}: {done} of {len(jobs)} tasks are done{more}", file=sys.stderr)
        if left:
            ended = execute(
                iter(left),
                failures,
                total=len(jobs),
                done=done,
                word="task",
                workers=workers,
                quiet=name is None,
            )
            deque(ended, maxlen=0)
    return failures
