# SPDX-License-Identifier: Apache-2.0
"""Runs a sweep from the beginning, or from where it was interrupted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.errors import ExperimentError, FedrecError
from fedrec.experiment.loading import load
from fedrec.report.privacy_total import PrivacyTotal, total_of
from fedrec.runs.folder import RunFolder
from fedrec.runtime.files import write_atomically
from simulations.studies.folder import SweepFolder, SweepJob
from simulations.studies.private import SCORES, ChoiceCost, cost_of, noisy_scores, publish
from simulations.studies.runs import StudyProgress, execute, opened
from simulations.studies.search import SweepPlan, installed, next_point
from simulations.studies.space import Point
from simulations.studies.sweep_tables import best, setting_rows, write


@dataclass(frozen=True)
class SweepResult:
    """Results of a sweep.

    Attributes:
        folder: of the sweep.
        plan: the sweep.
        runs: one row per run, see `run_rows`.
        settings: one row per setting, see `setting_rows`.
        chosen: numbers of the best settings (Pareto front) by the aims; empty without aims.
        failures: errors of runs by name of the run.
        total: privacy of all runs together.
        cost: of a private choice, which is that of what it publishes; None of other sweeps.
    """

    folder: Path
    plan: SweepPlan
    runs: pd.DataFrame
    settings: pd.DataFrame
    chosen: tuple[int, ...]
    failures: dict[str, str]
    total: PrivacyTotal
    cost: ChoiceCost | None = None

    def point(self, trial: int) -> Point:
        """The settings of a trial, counted from 1."""
        return SweepFolder(self.folder).trials()[trial - 1]


def sweep(
    plan: SweepPlan,
    output: Path,
    *,
    workers: int = 1,
    ray_address: str | None = None,
    retry_failed: bool = False,
    quiet: bool = True,
) -> SweepResult:
    """Run a sweep, or its remaining part.

    Args:
        plan: the sweep.
        output: its folder: a new one, or that of the same sweep.
        workers: number of runs at a time; more than 1 are Ray actors.
        ray_address: of a Ray cluster whose machines all see `output`; default: a local Ray.
        retry_failed: whether runs that ended with an error are done again.
        quiet: whether to print no progress.

    Raises:
        FedrecError: another sweep is in the folder, a private choice has no bound or would be made
            twice, or data, engine or disk are at fault.
    """
    if workers < 1:
        raise ExperimentError(
            "the number of workers", expected="1 or more", got=str(workers), fix="--workers 2"
        )
    if plan.method == "optimise":
        installed()
    cost = _cost(plan)
    folder = SweepFolder.opened(output, plan)
    with folder.lock():
        if retry_failed and (folder.path / SCORES).exists():
            raise ExperimentError(
                "the private choice has been made, so its trials cannot be done again",
                expected="one choice, as another one would be another release",
                got="--retry-failed",
                fix="leave it out, or choose another --output",
            )
        return _Execution(folder, retry_failed, cost).run(workers, ray_address, quiet)


class _Execution:
    """One execution of a sweep.

    Args:
        folder: of the sweep.
        retry_failed: whether runs that ended with an error are done again.
        cost: of a private choice; None of other sweeps.
    """

    def __init__(self, folder: SweepFolder, retry_failed: bool, cost: ChoiceCost | None) -> None:
        self.folder = folder
        self.cost = cost
        self.plan = folder.plan
        self._retry = retry_failed

    def run(self, workers: int, address: str | None, quiet: bool) -> SweepResult:
        """Do the remaining runs."""
        for job in self.folder.jobs() if self._retry else ():
            if job.name in self.folder.failures():
                self.folder.set_failure(job, None)
        done = sum(self._is_done(job) for job in self.folder.jobs())
        progress = StudyProgress(self.plan.trials * self.plan.runs_each, done, quiet=quiet)
        device = str(self.plan.experiment.get("engine", {}).get("device", "auto"))
        try:
            with opened(workers, address, device) as hands:
                for job, failure in execute(self._jobs(), hands, progress.on_rounds):
                    if failure is not None:
                        self.folder.set_failure(job, failure)
                    progress.on_end(job, failure, self._words(job))
                    write(self.folder)
        finally:
            progress.close()
            with suppress(FedrecError):
                write(self.folder)
        return result_of(self.folder, self.cost)

    def _jobs(self) -> Iterator[SweepJob]:
        """Remaining runs, generated one by one; proposed settings depend on the results so far."""
        trial = 0
        while True:
            if trial >= len(self.folder.trials()):
                point = next_point(self.plan, self.folder.trials(), self._values())
                if point is None:
                    return
                self.folder.add_trial(point)
            for seed in self.plan.seeds_of(trial):
                job = self.folder.job(trial, seed)
                if not self._is_done(job) and self._is_right(job):
                    yield job
            trial += 1

    def _is_done(self, job: SweepJob) -> bool:
        if job.name in self.folder.failures():
            return True
        run = job.run()
        return run is not None and run.status()["state"] == "finished"

    def _is_right(self, job: SweepJob) -> bool:
        """Whether its settings are valid; if not, the error is saved as its failure."""
        try:
            self.plan.at(self.folder.trials()[job.trial], job.seed)
        except ExperimentError as error:
            self.folder.set_failure(job, error.text())
            return False
        return True

    def _values(self) -> dict[int, Sequence[float]]:
        """Means of the aims of the settings all of whose runs are done; NaN where one failed."""
        runs, _ = write(self.folder)
        settings = setting_rows(list(self.plan.space), runs)
        found: dict[int, Sequence[float]] = {}
        for trial, own in runs.groupby("trial"):
            states = set(own["state"])
            if states <= {"finished", "failed"}:
                number = int(str(trial))
                if states == {"finished"}:
                    row = [self._aim(settings, number, aim) for aim in self.plan.aims]
                else:
                    row = [math.nan] * len(self.plan.aims)
                found[number - 1] = row
        return found

    @staticmethod
    def _aim(settings: pd.DataFrame, trial: int, aim: str) -> float:
        if aim not in settings.columns:
            known = [name for name in settings.columns if "@" in name and not name.endswith(" sd")]
            raise ExperimentError(
                f"runs have no {aim!r}",
                expected="a metric of the runs",
                got=aim,
                fix="known: " + ", ".join(known),
            )
        return float(settings[aim].to_dict()[trial])

    def _words(self, job: SweepJob) -> str:
        """The most important metric of a run."""
        failed = job.name in self.folder.failures()
        values = {} if failed else self.folder.values(job) or {}
        wanted = [*self.plan.aims, "hits@10", "rmse", *values]
        shown = [name for name in dict.fromkeys(wanted) if name in values][
            : max(1, len(self.plan.aims))
        ]
        return "  ".join(f"{name} {values[name]:.4f}" for name in shown)


def result_of(folder: SweepFolder, cost: ChoiceCost | None = None) -> SweepResult:
    """The results of a sweep so far; selected settings are written as experiments on the test
    rows, and the run of a private choice is published.

    Args:
        folder: of the sweep.
        cost: of its private choice; default: it is computed.
    """
    runs, settings = write(folder)
    begun = [run for job in folder.jobs() if (run := job.run()) is not None]
    plan = folder.plan
    scored = _scored(folder, settings)
    chosen = best(scored, plan.aims, plan.runs_each, plan.lower_is_better) if len(scored) else []
    cost = cost or _cost(plan)
    if cost is not None:
        chosen = chosen[:1]  # of equally good trials any one, as they are exchangeable
    for trial in chosen:
        job = folder.job(trial - 1, plan.seeds_of(trial - 1)[0])
        if cost is not None:
            score = float(scored[plan.aims[0]].to_dict()[trial])
            publish(RunFolder(job.run_path), score, cost, folder.path)
            continue
        experiment = plan.at(folder.trials()[trial - 1], job.seed)
        text = load(experiment.table(), ["evaluation.held-out=test"]).toml()
        write_atomically(chosen_file(folder.path, trial), text)
    return SweepResult(
        folder=folder.path,
        plan=folder.plan,
        runs=runs,
        settings=settings,
        chosen=tuple(chosen),
        failures=folder.failures(),
        total=total_of([RunFolder(run.path) for run in begun], chosen=bool(folder.plan.aims)),
        cost=cost,
    )


def _cost(plan: SweepPlan) -> ChoiceCost | None:
    """The cost of a private choice; None of other sweeps."""
    if plan.private is None:
        return None
    return cost_of(plan.experiment, plan.space, plan.private, plan.aims[0])


def _scored(folder: SweepFolder, settings: pd.DataFrame) -> pd.DataFrame:
    """The settings by which one is chosen: under private choice only when all trials are done, and
    with the noise of their scores."""
    choice = folder.plan.private
    if choice is None:
        return settings
    aim = folder.plan.aims[0]
    failed = folder.failures()
    done = sum(job.name in failed or folder.values(job) is not None for job in folder.jobs())
    if done < folder.plan.trials or aim not in settings:
        return settings.head(0)
    scores = [float(value) for value in np.array(settings[aim], dtype=float)]
    trials = [int(str(trial)) for trial in settings.index]
    known = {trial: one for trial, one in zip(trials, scores, strict=True) if math.isfinite(one)}
    noisy = noisy_scores(folder.path, load(folder.plan.experiment), choice, known)
    return settings.assign(**{aim: [noisy.get(trial, math.nan) for trial in trials]})


def chosen_file(folder: Path, trial: int) -> Path:
    """The experiment file of a selected setting, to be evaluated once on the test rows."""
    return folder / f"chosen-{trial:04d}.toml"
