# SPDX-License-Identifier: Apache-2.0
"""Tasks that are runs of experiments: shipped ones with overrides, or tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedrec.errors import RunError
from fedrec.experiment.loading import load, read
from fedrec.experiment.schema import Experiment
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from simulations import runner
from simulations.reproduce.quick import shrunk
from simulations.reproduce.study import Found, Job, Task

_CHECKPOINTS = 20  # of a run, at least
_NORMAL = 1.959964  # quantile of 95 % intervals over users
SYSTEM = ""
"""Stands for the experiment's federated system among the labels of its baselines."""


def run_task(
    name: str,
    source: str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    dataset: str,
    models: Mapping[str, str],
    metrics: Mapping[str, str],
    seconds: float,
    seeded: bool = True,
    sample: bool = True,
) -> Task:
    """A task that is one run.

    Args:
        name: of the task.
        source: the name of a shipped experiment, or a table.
        overrides: of the experiment.
        dataset: as the paper calls it.
        models: our label of a system (`SYSTEM`, or a baseline) -> row of the paper's table.
        metrics: our metric -> the paper's.
        seconds: about how long it takes.
        seeded: whether the seed matters.
        sample: whether `--quick` includes it.
    """

    def work(job: Job) -> list[Found]:
        return list(values(finished(job, source, overrides), dataset, models, metrics))

    return Task(name, seconds, work, seeded, sample)


def finished(job: Job, source: str | Mapping[str, Any], overrides: Sequence[str]) -> Result:
    """The result of a job's run: read if finished, else continued from its newest checkpoint, or
    run.

    Raises:
        RunError: another run is in the job's folder, for example with settings of an earlier
            version.
    """
    path = job.folder / "run"
    table = read(source, overrides)
    if job.quick:
        table = shrunk(table)
    experiment = load(table, [f"seed={job.seed}", "engine.name=serial"])
    experiment = _often_saved(experiment)
    if not (path / "run.json").is_file():
        return runner.run(experiment, output=path)
    settled = runner.settle(runner.with_private_popularity(experiment))
    if RunFolder(path).experiment.digest() != settled.digest():
        raise RunError(
            f"{path} holds a run of other settings",
            expected=f"the run {settled.name!r} as this study has it",
            got="a run that was begun with other settings, such as by another version of fedrec",
            fix=f"remove {job.folder}, or choose another --output",
        )
    return runner.resume(path)


def _often_saved(experiment: Experiment) -> Experiment:
    """The same experiment with at least twenty checkpoints, so that a killed study loses little."""
    every = min(experiment.checkpoint.every, max(1, experiment.rounds // _CHECKPOINTS))
    checkpoint = experiment.checkpoint.model_copy(update={"every": every})
    return experiment.model_copy(update={"checkpoint": checkpoint})


def values(
    result: Result, dataset: str, models: Mapping[str, str], metrics: Mapping[str, str]
) -> Iterator[Found]:
    """The numbers of a run, with intervals over its users."""
    for label, model in models.items():
        means = result.baselines.get(label, {}) if label else result.metrics
        users = result.baseline_users.get(label) if label else result.users
        for ours, theirs in metrics.items():
            if ours in means:
                half = _half_width(users, ours)
                low, high = (
                    (None, None) if half is None else (means[ours] - half, means[ours] + half)
                )
                yield Found(dataset, model, theirs, means[ours], low, high)


def _half_width(users: pd.DataFrame | None, metric: str) -> float | None:
    """Half the width of a normal 95 % interval of a mean over users; None where there is no such
    mean."""
    if users is None or metric not in users:
        return None
    column = np.array(list(users[metric].dropna()), dtype=float)
    pooled = metric == "rmse" or "rows" in users  # errors are means over rows, and not over users
    if pooled or len(column) < 2:
        return None
    return _NORMAL * float(np.std(column, ddof=1)) / math.sqrt(len(column))
