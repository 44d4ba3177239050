# SPDX-License-Identifier: Apache-2.0
"""The tables of a sweep: one row per run, and one per setting with mean and standard deviation over
the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedrec.evaluation.tables import lower_is_better
from fedrec.runtime.files import write_atomically
from simulations.studies.folder import SweepFolder
from simulations.studies.space import Point, toml_value

_RUN = ["trial", "seed", "state"]
LEAK = "leak"
"""The column that tables have where negatives leaked held-out items
(`fedrec.experiment.schema`)."""


def run_rows(sweep: SweepFolder) -> pd.DataFrame:
    """One row per run: `trial` (from 1), the varied keys, `seed`, `state`, `folder`, its metrics
    once finished, and `leak` where any of them leaks."""
    trials = sweep.trials()
    failures = sweep.failures()
    leaking = [sweep.plan.leaks(point) for point in trials]
    rows = []
    for job in sweep.jobs():
        values = sweep.values(job) if job.name not in failures else None
        run = job.run() if values is None else None
        state = "failed" if job.name in failures else "waiting"
        state = (
            "finished" if values is not None else state if run is None else run.status()["state"]
        )
        rows.append(
            {
                "trial": job.trial + 1,
                **shown(trials[job.trial]),
                "seed": job.seed,
                "state": state,
                **(values or {}),
                **({LEAK: leaking[job.trial]} if any(leaking) else {}),
                "folder": f"runs/{job.name}",
            }
        )
    return pd.DataFrame(rows, columns=None if rows else [*_RUN, "folder"])


def setting_rows(plan_keys: Sequence[str], runs: pd.DataFrame) -> pd.DataFrame:
    """One row per setting.

    Args:
        plan_keys: the varied keys.
        runs: as from `run_rows`.

    Returns:
        The varied keys, `runs` (finished), `leak` if `runs` has it, and of each metric the mean
        and, as `METRIC sd`, the standard deviation over seeds, NaN for one seed; index: number of
        the setting, from 1.
    """
    known = {*_RUN, *plan_keys, LEAK, "folder"}
    metrics = [name for name in runs.columns if name not in known]
    rows = {}
    for trial, own in runs.groupby("trial"):
        done = own[own["state"] == "finished"]
        row: dict[str, Any] = {key: own[key].iloc[0] for key in plan_keys}
        row["runs"] = len(done)
        if LEAK in own:
            row[LEAK] = bool(own[LEAK].iloc[0])
        for name in metrics:
            numbers = np.array(list(done[name]), dtype=float)
            row[name] = numbers.mean() if len(numbers) else math.nan
            finite = len(numbers) > 1 and np.isfinite(numbers).all()
            row[f"{name} sd"] = numbers.std(ddof=1) if finite else math.nan
        rows[trial] = row
    frame = pd.DataFrame.from_dict(rows, orient="index")
    frame.index.name = "trial"
    return frame


def best(
    settings: pd.DataFrame,
    aims: Sequence[str],
    seeds: int,
    lower: Callable[[str], bool] = lower_is_better,
) -> list[int]:
    """The best settings: the best by one aim, or the Pareto front of two, in the order of the first
    aim.

    A setting with a failed run is not selected.
    """
    if not aims or not set(aims) <= set(settings.columns):
        return []
    signs = [1.0 if lower(aim) else -1.0 for aim in aims]
    losses = {}
    for trial, row in settings.to_dict("index").items():
        own = tuple(sign * row[aim] for sign, aim in zip(signs, aims, strict=True))
        if row["runs"] == seeds and not any(map(math.isnan, own)):
            losses[int(str(trial))] = own
    kept = [(own, trial) for trial, own in losses.items() if not _beaten(own, losses.values())]
    return [trial for _, trial in sorted(kept)]


def _beaten(own: tuple[float, ...], others: Iterable[tuple[float, ...]]) -> bool:
    """Whether another setting is as good by all aims, and better by one."""
    return any(
        other != own and all(theirs <= mine for theirs, mine in zip(other, own, strict=True))
        for other in others
    )


def write(sweep: SweepFolder) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Write runs.csv and settings.csv; returns both."""
    runs = run_rows(sweep)
    settings = setting_rows(list(sweep.plan.space), runs)
    write_atomically(sweep.path / "runs.csv", runs.to_csv(index=False), durable=False)
    write_atomically(sweep.path / "settings.csv", settings.to_csv(), durable=False)
    return runs, settings


def shown(point: Point) -> dict[str, Any]:
    """A setting for display in a table: numbers and strings unchanged, lists and tables as TOML."""
    return {
        key: value if isinstance(value, int | float | str) else toml_value(value)
        for key, value in point.items()
    }
