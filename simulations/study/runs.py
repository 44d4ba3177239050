# SPDX-License-Identifier: Apache-2.0
"""Runs of a study: each once, in its own folder, and the numbers that they give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedrec.attacks.leaky_negatives import marked
from fedrec.errors import RunError
from fedrec.evaluation.metrics import Metrics, lower_is_better
from fedrec.experiment.schema import Experiment
from fedrec.report.inputs import system_inputs
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from server.callbacks.base import Callback
from simulations.study.study import Found, TaskJob

_CHECKPOINTS = 20  # of a run, at least
_NORMAL = 1.959964  # quantile of 95 % intervals over users
SYSTEM = ""
"""Stands for the experiment's federated system among the labels of its baselines."""


def run_once(experiment: Experiment, folder: Path, callbacks: Sequence[Callback] = ()) -> RunFolder:
    """Run an experiment, or continue or reuse the run in the folder.

    Raises:
        RunError: the folder holds a run of another experiment, for example with settings of an
            earlier version.
        FedrecError: see `simulations.runner.run`.
    """
    from simulations import runner

    if not (folder / "run.json").is_file():
        return RunFolder(runner.run(experiment, output=folder, callbacks=callbacks).folder)
    found = RunFolder(folder)
    asked = runner.with_private_popularity(experiment)
    settled = runner.settle(asked, found.experiment.engine)
    if found.experiment.digest() != settled.digest():
        raise RunError(
            f"{folder} holds a run of other settings",
            expected=f"the run {settled.name!r} with the same settings",
            got=f"{found.experiment.name!r} with digest {found.experiment.digest()[:12]}, such as "
            "of another version of fedrec",
            fix=f"remove {folder}, or choose another --output",
        )
    runner.resume(folder, callbacks=callbacks)
    return found


def finished(
    job: TaskJob, source: str | Mapping[str, Any], overrides: Sequence[str] = ()
) -> Result:
    """The result of a job's run: read if finished, else continued from its newest checkpoint, or
    run; with at least twenty checkpoints, so that a killed study loses little."""
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
    """The numbers of one run.

    Args:
        job: of the task.
        experiment: the name of a shipped experiment, or a table.
        dataset: as the paper calls it.
        metrics: our metric -> the paper's.
        row: row of the paper's table for the federated system.
        rows: our label of a system (`SYSTEM`, or a baseline) -> row of the paper's table.
        set: overrides of the experiment.
        groups: groups of users with rows of their own.
        above: a baseline that the system is compared with, user by user.
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
    """The numbers of a run, with intervals over its users."""
    experiment = result.experiment
    ranges = Metrics(experiment.task, experiment.evaluation).ranges
    inputs = system_inputs(result)
    for label, row in rows.items():
        own = inputs.get(marked(experiment) if label == SYSTEM else label)
        stated = None if own is None else asdict(own)
        means = result.metrics if label == SYSTEM else result.baselines.get(label, {})
        users = result.users if label == SYSTEM else result.baseline_users.get(label)
        for ours, theirs in metrics.items():
            if ours in means:
                interval = _interval(means[ours], users, ours)
                lower = lower_is_better(ours, experiment.evaluation)
                least, most = ranges.get(ours, (None, None))
                yield Found(dataset, row, theirs, *interval, lower, least, most, stated)


def gap(result: Result, baseline: str, metric: str) -> tuple[float, float | None, float | None]:
    """How far a system is above one of its run's baselines, paired by user.

    Returns:
        Mean of the differences over the users, and the ends of its 95 % interval.

    Raises:
        RunError: the users of that baseline were not saved, or do not have its mean.
    """
    users = result.baseline_users.get(baseline)
    mean = result.baselines[baseline][metric]
    found = math.nan if users is None else float(np.mean(users[metric].to_numpy()))
    if users is None or not math.isclose(found, mean, abs_tol=1e-9):
        raise RunError(
            f"{baseline} is not what it was in {result.folder}",
            expected=f"users with a mean {metric} of {mean:.6f}, as in baselines.json",
            got="no users" if users is None else f"{found:.6f}",
            fix=f"remove {result.folder} and run the same command again",
        )
    apart = result.users[metric] - users.loc[result.users.index, metric]
    return _interval(float(apart.mean()), pd.DataFrame({metric: apart}), metric)


def _interval(
    mean: float, users: pd.DataFrame | None, metric: str
) -> tuple[float, float | None, float | None]:
    """A mean over users and the ends of its normal 95 % interval; None where there is no such
    mean."""
    if users is None or metric not in users:
        return mean, None, None
    column = np.array(list(users[metric].dropna()), dtype=float)
    pooled = metric == "rmse" or "rows" in users  # errors are means over rows, and not over users
    if pooled or len(column) < 2:
        return mean, None, None
    half = _NORMAL * float(np.std(column, ddof=1)) / math.sqrt(len(column))
    return mean, mean - half, mean + half
