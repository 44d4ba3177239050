# SPDX-License-Identifier: Apache-2.0
"""Runs a sweep from the beginning, or from where it was interrupted. Its folder:

    sweep.json         experiment, what is varied, seeds, aims
    trials.json        the settings that were tried, in order
    failures.json      runs that ended with an error, and the error
    runs/0001-seed0/   run folders: number of the setting, seed
    runs.csv           one row per run: settings, seed, state, metrics
    settings.csv       one row per setting: means over seeds and their standard deviations
    scores.json        under private choice: the score of each trial, with its noise
    chosen/            under private choice: the published run (`simulations.studies.private`)

Under private choice the folder is readable by its owner alone (mode 0700), because nothing in it
may be published but `chosen/`.

An interrupted sweep continues its started runs from their checkpoints.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pandas as pd

from fedrec.errors import ExperimentError, FedrecError, RunError
from fedrec.evaluation.tables import lower_is_better
from fedrec.experiment.loading import load
from fedrec.report.privacy_total import PrivacyTotal, total_of
from fedrec.runs.folder import RunFolder
from fedrec.runtime.files import read_json, write_atomically
from fedrec.runtime.shared_memory import is_number, number
from server.callbacks.base import Callback
from simulations import runner
from simulations.studies.declaration import Job
from simulations.studies.private import CHOSEN, SCORES, ChoiceCost, cost_of, noisy_scores, publish
from simulations.studies.runs import StudyFolder, StudyProgress, execute
from simulations.studies.search import SweepPlan, installed, next_point
from simulations.studies.space import Point, toml_value

SWEEP = "sweep.json"
LEAK = "leak"
"""The column that tables have where negatives leaked held-out items
(`fedrec.experiment.schema`)."""
_RUN = ["trial", "seed", "state"]


@dataclass(frozen=True)
class SweepJob(Job):
    """One run of a sweep.

    Attributes:
        sweep: folder of the sweep.
        trial: number of the setting, from 0.
        seed: of the run.
    """

    sweep: Path
    trial: int
    seed: int

    @property
    def name(self) -> str:
        """Name of its run folder."""
        return f"{self.trial + 1:04d}-seed{self.seed}"

    @property
    def run_path(self) -> Path:
        """Folder of the run, which may not exist yet."""
        return self.sweep / "runs" / self.name

    def run(self) -> RunFolder | None:
        """The folder of the run, if it has begun."""
        return RunFolder(self.run_path) if (self.run_path / "run.json").is_file() else None

    def perform(self, callbacks: Sequence[Callback]) -> None:
        """Run the setting, or what is left of its run."""
        if self.run() is not None:
            runner.resume(self.run_path, callbacks=callbacks)
            return
        shutil.rmtree(self.run_path, ignore_errors=True)  # of an interrupted start
        folder = SweepFolder(self.sweep)
        experiment = folder.plan.at(folder.trials()[self.trial], self.seed)
        runner.run(experiment, output=self.run_path, callbacks=callbacks)


class SweepFolder(StudyFolder):
    """A sweep on disk.

    Args:
        path: an existing sweep folder; use `opened` for a new one.

    Raises:
        RunError: there is no sweep at `path`, or its files are damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, SWEEP, "sweep")
        if not (self.path / SWEEP).is_file():
            raise RunError(
                f"{path} is not the folder of a sweep",
                expected=f"a folder with {SWEEP}",
                got="another folder" if self.path.is_dir() else "no such folder",
                fix="give the folder that `fedrec sweep` printed",
            )
        self._values: dict[str, dict[str, float]] = {}
        try:
            self.plan = SweepPlan.of_record(self.read(SWEEP))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self.damaged(SWEEP, f"{type(error).__name__}: {error}") from None

    @classmethod
    def opened(cls, path: Path, plan: SweepPlan) -> SweepFolder:
        """The folder of a sweep: a new one, or that of the same sweep, which is then continued.

        More trials of random settings, or of optimisation, continue where fewer ended. A private
        choice keeps the number of trials and the seeds that were drawn first.

        Raises:
            RunError: there is another sweep at `path`, or something else.
        """
        folder = StudyFolder(path, SWEEP, "sweep")
        if not folder.begun():
            if plan.private is not None:
                folder.path.mkdir(parents=True, exist_ok=True)
                folder.path.chmod(0o700)
            folder.write(SWEEP, plan.record())
        opened = cls(path)
        opened._continue_with(plan)
        return opened

    def _continue_with(self, plan: SweepPlan) -> None:
        before = self.plan.record()
        asked = plan.record()
        longer = plan.method in ("random", "optimise") and plan.trials > self.plan.trials
        drawn = ("trials", "seeds") if plan.private is not None else ()
        free = ("trials",) if longer else drawn
        other = [key for key in before if before[key] != asked.get(key) and key not in free]
        if other:
            raise RunError(
                f"there is another sweep in {self.path}",
                expected="the same experiment, settings, seeds, trials and aims",
                got=f"{', '.join(other)} differ from its {SWEEP}",
                fix=(
                    "choose another --output, or continue it: fedrec resume"
                    f" {quote(str(self.path))}"
                ),
            )
        if longer:
            self.write(SWEEP, asked)
            self.plan = plan

    def trials(self) -> list[Point]:
        """The settings tried so far."""
        return self._read_all("trials.json", list, "a list of settings")

    def add_trial(self, point: Point) -> None:
        """Save a setting before its first run begins."""
        self.write("trials.json", [*self.trials(), point])

    def failures(self) -> dict[str, str]:
        """Errors of runs, by name of the run."""
        errors = self._read_all("failures.json", dict, "errors by the names of runs")
        return {name: str(text) for name, text in errors.items()}

    def _read_all(self, name: str, kind: type, expected: str) -> Any:
        content = self.read(name) if (self.path / name).exists() else kind()
        entries = content if isinstance(content, list) else []
        if not isinstance(content, kind) or not all(isinstance(entry, dict) for entry in entries):
            raise self.damaged(name, f"not {expected}")
        return content

    def set_failure(self, job: SweepJob, text: str | None) -> None:
        """Save the error of a run; None removes it, so that the run is repeated."""
        failures = {name: error for name, error in self.failures().items() if name != job.name}
        failures |= {} if text is None else {job.name: text}
        self.write("failures.json", failures)
        if text is None:
            self._values.pop(job.name, None)
            shutil.rmtree(job.run_path, ignore_errors=True)

    def values(self, job: SweepJob) -> dict[str, float] | None:
        """The metrics of a finished run, see `values_of`; None for other runs."""
        if job.name not in self._values:
            run = job.run()
            if run is None or run.status()["state"] != "finished":
                return None
            self._values[job.name] = values_of(run)
        return self._values[job.name]

    def jobs(self) -> list[SweepJob]:
        """All runs of the settings tried so far."""
        trials = range(len(self.trials()))
        return [self.job(trial, seed) for trial in trials for seed in self.plan.seeds_of(trial)]

    def job(self, trial: int, seed: int) -> SweepJob:
        """One run."""
        return SweepJob(self.path, trial, seed)

    def done(self) -> set[str]:
        """The names of runs that are finished or failed."""
        failures = self.failures()
        finished = {job.name for job in self.jobs() if self.values(job) is not None}
        return finished | failures.keys()

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Write runs.csv and settings.csv; return both.

        Returns:
            One row per run: `trial` (from 1), the varied keys, `seed`, `state`, `folder`, its
            metrics once finished, and `leak` where any of them leaks; and one row per setting, see
            `setting_rows`.
        """
        trials = self.trials()
        failures = self.failures()
        leaking = [self.plan.leaks(point) for point in trials]
        rows = []
        for job in self.jobs():
            values = self.values(job) if job.name not in failures else None
            state = "failed" if job.name in failures else "waiting"
            if values is not None:
                state = "finished"
            elif (run := job.run()) is not None:
                state = run.status()["state"]
            point = trials[job.trial]
            row = {"trial": job.trial + 1, **{key: _shown(point[key]) for key in point}}
            row |= {"seed": job.seed, "state": state, **(values or {})}
            row |= {LEAK: leaking[job.trial]} if any(leaking) else {}
            rows.append({**row, "folder": f"runs/{job.name}"})
        runs = pd.DataFrame(rows, columns=None if rows else [*_RUN, "folder"])
        settings = setting_rows(list(self.plan.space), runs)
        write_atomically(self.path / "runs.csv", runs.to_csv(index=False), durable=False)
        write_atomically(self.path / "settings.csv", settings.to_csv(), durable=False)
        return runs, settings


def _shown(value: Any) -> int | float | str:
    """A value in a table: numbers and strings unchanged, lists and tables as TOML."""
    return value if isinstance(value, int | float | str) else toml_value(value)


def setting_rows(keys: Sequence[str], runs: pd.DataFrame) -> pd.DataFrame:
    """One row per setting.

    Args:
        keys: the varied keys.
        runs: see `SweepFolder.tables`.

    Returns:
        The varied keys, `runs` (finished), `leak` if `runs` has it, and of each metric the mean
        and, as `METRIC sd`, the standard deviation over seeds, NaN for one seed; index: number of
        the setting, from 1.
    """
    about = {*_RUN, *keys, LEAK, "folder"}
    metrics = [name for name in runs.columns if name not in about]
    rows = {}
    for trial, group in runs.groupby("trial"):
        done = group[group["state"] == "finished"]
        row: dict[str, Any] = {key: group[key].iloc[0] for key in keys}
        row["runs"] = len(done)
        if LEAK in group:
            row[LEAK] = bool(group[LEAK].iloc[0])
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
    aim. A setting with a failed run is not selected."""
    if not aims or not set(aims) <= set(settings.columns):
        return []
    signs = np.array([1.0 if lower(aim) else -1.0 for aim in aims])
    losses = settings[list(aims)].to_numpy(dtype=float) * signs
    valid = (settings["runs"].to_numpy() == seeds) & ~np.isnan(losses).any(1)
    trials = [int(str(trial)) for trial in settings.index[valid]]
    losses = losses[valid]
    front = [
        (tuple(loss), trial)
        for loss, trial in zip(losses, trials, strict=True)
        if not ((losses <= loss).all(1) & (losses < loss).any(1)).any()
    ]
    return [trial for _, trial in sorted(front)]


@dataclass(frozen=True)
class SweepResult:
    """Results of a sweep.

    Attributes:
        folder: of the sweep.
        plan: the sweep.
        runs: one row per run, see `SweepFolder.tables`.
        settings: one row per setting, see `setting_rows`.
        chosen: numbers of the best settings (Pareto front) by the aims; empty without aims.
        failures: errors of runs by name of the run.
        total: privacy of all runs.
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
        workers: number of runs at a time; more than 1 are Ray tasks.
        ray_address: of a Ray cluster whose machines all see `output`; default: a local Ray.
        retry_failed: whether runs that ended with an error are done again.
        quiet: whether to print no progress.

    Raises:
        FedrecError: another sweep is in the folder, a private choice has no bound or would be made
            twice, or data, engine or disk are at fault.
    """
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
        for job in folder.jobs() if retry_failed else ():
            if job.name in folder.failures():
                folder.set_failure(job, None)
        progress = StudyProgress(plan.trials * plan.runs_each, len(folder.done()), quiet=quiet)
        device = str(plan.experiment.get("engine", {}).get("device", "auto"))
        left = _remaining(folder)
        try:
            for job, failure in execute(
                left, progress.on_rounds, workers=workers, address=ray_address, device=device
            ):
                if failure is not None:
                    folder.set_failure(job, failure)
                progress.on_end(job, failure, _main_metrics(folder, job))
                folder.tables()
        finally:
            with suppress(FedrecError):
                folder.tables()
        return result_of(folder, cost)


def _remaining(folder: SweepFolder) -> Iterator[SweepJob]:
    """Remaining runs, generated one by one; proposed settings depend on the results so far. The
    error of invalid settings is saved as that of their runs."""
    plan = folder.plan
    trial = 0
    while True:
        if trial >= len(folder.trials()):
            point = next_point(plan, folder.trials(), _aims_of_done(folder))
            if point is None:
                return
            folder.add_trial(point)
        point = folder.trials()[trial]
        for seed in plan.seeds_of(trial):
            job = folder.job(trial, seed)
            if job.name in folder.failures() or folder.values(job) is not None:
                continue
            try:
                plan.at(point, seed)
            except ExperimentError as error:
                folder.set_failure(job, error.text())
            else:
                yield job
        trial += 1


def _aims_of_done(folder: SweepFolder) -> dict[int, Sequence[float]]:
    """Means of the aims of the settings, from 0, all of whose runs are done; NaN where one
    failed."""
    runs, settings = folder.tables()
    aims = list(folder.plan.aims)
    values: dict[int, Sequence[float]] = {}
    for trial, group in runs.groupby("trial"):
        states = set(group["state"])
        if not states <= {"finished", "failed"}:
            continue
        number = int(str(trial))
        values[number - 1] = [math.nan] * len(aims)
        if states == {"finished"}:
            _check_aims(aims, settings)
            values[number - 1] = [float(value) for value in settings.loc[number, aims]]
    return values


def _check_aims(aims: Sequence[str], settings: pd.DataFrame) -> None:
    for aim in aims:
        if aim not in settings.columns:
            metrics = [name for name in settings if "@" in name and not name.endswith(" sd")]
            raise ExperimentError(
                f"runs have no {aim!r}",
                expected="a metric of the runs",
                got=aim,
                fix="known: " + ", ".join(metrics),
            )


def _main_metrics(folder: SweepFolder, job: SweepJob) -> str:
    """The most important metrics of a run."""
    aims = folder.plan.aims
    values = {} if job.name in folder.failures() else folder.values(job) or {}
    names = [name for name in dict.fromkeys([*aims, "hits@10", "rmse", *values]) if name in values]
    return "  ".join(f"{name} {values[name]:.4f}" for name in names[: max(1, len(aims))])


def result_of(folder: SweepFolder, cost: ChoiceCost | None = None) -> SweepResult:
    """The results of a sweep so far; selected settings are written as experiments on the test
    rows, and the run of a private choice is published.

    Args:
        folder: of the sweep.
        cost: of its private choice; default: it is computed.
    """
    runs, settings = folder.tables()
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
    begun = [run for job in folder.jobs() if (run := job.run()) is not None]
    return SweepResult(
        folder=folder.path,
        plan=plan,
        runs=runs,
        settings=settings,
        chosen=tuple(chosen),
        failures=folder.failures(),
        total=total_of(begun, chosen=bool(plan.aims)),
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
    plan = folder.plan
    if plan.private is None:
        return settings
    aim = plan.aims[0]
    if len(folder.done()) < plan.trials or aim not in settings:
        return settings.head(0)
    values = np.array(settings[aim], dtype=float).tolist()
    scores = {int(str(trial)): score for trial, score in zip(settings.index, values, strict=True)}
    finite = {trial: score for trial, score in scores.items() if math.isfinite(score)}
    noisy = noisy_scores(folder.path, load(plan.experiment), plan.private, finite)
    return settings.assign(**{aim: [noisy.get(trial, math.nan) for trial in scores]})


def chosen_file(folder: Path, trial: int) -> Path:
    """The experiment file of a selected setting, to be evaluated once on the test rows."""
    return folder / f"chosen-{trial:04d}.toml"


def with_sweeps(folders: Sequence[Path]) -> list[Path]:
    """Run folders, and in place of each sweep its finished runs, or under private choice the
    published one alone.

    Raises:
        RunError: a sweep has no finished run, or has not chosen yet.
    """
    runs: list[Path] = []
    for folder in folders:
        if not (folder / SWEEP).is_file():
            runs.append(folder)
            continue
        record = StudyFolder(folder, SWEEP, "sweep").read(SWEEP)
        private = isinstance(record, dict) and "private" in record
        pattern = f"{CHOSEN}/result.json" if private else "runs/*/result.json"
        finished = sorted(file.parent for file in folder.glob(pattern))
        if not finished:
            raise RunError(
                f"{folder} has no finished run",
                expected="a sweep with finished runs",
                got="a private choice that is not made yet"
                if private
                else "a sweep that has just begun",
                fix=f"fedrec resume {folder}",
            )
        runs += finished
    return runs


def values_of(run: RunFolder) -> dict[str, float]:
    """Metrics of a finished run, and its epsilon, infinite without privacy.

    Of centralised systems alone the names are `LABEL METRIC`, such as `ease hits@10`.

    Raises:
        RunError: its result cannot be read.
    """
    try:
        result = read_json(run.path / "result.json")
        if run.experiment.federated:
            epsilon = float(result.get("privacy", {}).get("epsilon", math.inf))
            return {**_numbers(result["metrics"]), "epsilon": epsilon}
        return {
            f"{label} {name}": value
            for label, metrics in result["baselines"].items()
            for name, value in _numbers(metrics).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{run.path / 'result.json'} cannot be read",
            expected="a file as fedrec wrote it",
            got=f"{type(error).__name__}: {error}",
            fix=f"remove {run.path} and run the same command again: that run is done again",
        ) from None


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics; NaN for those that no user has.

    Raises:
        TypeError: one is no number.
    """
    wrong = [name for name, value in metrics.items() if not is_number(value)]
    if wrong:
        raise TypeError(f"{wrong[0]} = {metrics[wrong[0]]!r} is no number")
    return {name: number(value) for name, value in metrics.items()}
