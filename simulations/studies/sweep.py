# SPDX-License-Identifier: Apache-2.0
"""Sweeps over settings and seeds of an experiment, with selection of the best setting. Settings are
never selected on test users: a sweep with aims is refused unless it evaluates validation rows. Its
folder:

    sweep.json         experiment, varied keys, seeds, aims
    trials.json        the settings that were tried, in order
    runs/0001-seed0/   run folders: number of the setting, seed
    runs.csv           one row per run: settings, seed, state, metrics
    settings.csv       one row per setting: means over seeds and their standard deviations
    chosen/            under private choice: the published run (`simulations.studies.private`)

Under private choice only the owner can read the folder (mode 0700), because only `chosen/` may be
published.

An interrupted sweep continues its started runs from their checkpoints, and repeats runs that
failed.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from pydantic import BaseModel

from fedrec.errors import ExperimentError, FedrecError, RunError, unknown
from fedrec.evaluation.tables import lower_is_better
from fedrec.experiment.schema import Experiment, load, read
from fedrec.privacy.accounting.accountant import Law, RandomTrials
from fedrec.report.privacy_total import PrivacyTotal, total_of
from fedrec.runs.folder import RunFolder
from fedrec.runtime.files import write_atomically
from server.callbacks.base import Callback
from simulations.studies.declaration import Job
from simulations.studies.private import CHOSEN, ChoiceCost, choice_stream, cost_of, publish
from simulations.studies.runs import StudyFolder, execute, run_once
from simulations.studies.search import (
    MOST,
    Point,
    Space,
    drawn,
    grid,
    installed,
    overrides,
    proposed,
    space_of,
    toml_value,
    unlike,
)

SWEEP = "sweep.json"
TRIALS = 20
"""Default number of settings that `optimise` tries."""
LEAK = "leak"
"""Column of runs in which negatives leaked held-out items (`fedrec.experiment.schema`)."""
_SEEDS = 2**53  # integers that all JSON readers represent exactly
Method: TypeAlias = Literal["grid", "random", "optimise", "private"]


class SweepPlan(BaseModel, frozen=True, extra="forbid"):
    """Plan of a sweep.

    Attributes:
        experiment: table of the experiment that is varied, without defaults.
        vary: varied keys and values, see `space_of`; empty if only the seed varies.
        seeds: seeds of each setting's runs; under private choice one per trial.
        method: how settings are found.
        trials: number of settings.
        aims: metrics for selection, such as `hits@10` or `epsilon`; none: no setting is selected.
        private: private choice of one setting; None: not private.
    """

    experiment: dict[str, Any]
    vary: tuple[str, ...]
    seeds: tuple[int, ...]
    method: Method
    trials: int
    aims: tuple[str, ...] = ()
    private: RandomTrials | None = None

    @cached_property
    def space(self) -> Space:
        """Search space of the sweep."""
        return space_of(self.vary)

    @cached_property
    def cost(self) -> ChoiceCost | None:
        """Cost of a private choice; None for other sweeps.

        Raises:
            ExperimentError: see `cost_of`.
        """
        if self.private is None:
            return None
        return cost_of(self.experiment, self.space, self.private, self.aims[0])

    @property
    def runs_each(self) -> int:
        """Number of runs of each setting."""
        return len(self.seeds) if self.private is None else 1

    def at(self, point: Point, seed: int) -> Experiment:
        """Experiment of a run.

        Raises:
            ExperimentError: the settings are inconsistent, or would be selected on test rows.
        """
        experiment = load(self.experiment, [*overrides(point), f"seed={seed}"])
        if self.aims and experiment.evaluation.held_out == "test":
            raise ExperimentError(
                "settings cannot be selected on test users",
                expected="evaluation.held-out = 'validation' in a sweep with aims",
                got="'test', on which the selected setting is evaluated later",
                fix="--set evaluation.held-out=validation, with validation rows in the split, such "
                "as --set split.validation-users=0.1; where validation users train, "
                "--set split.validation-role=held-out",
            )
        return experiment

    def lower_is_better(self, aim: str) -> bool:
        """True if smaller values of an aim are better."""
        return lower_is_better(aim, load(self.experiment).evaluation)

    def next_point(
        self, tried: Sequence[Point], values: Callable[[], Mapping[int, Sequence[float]]]
    ) -> Point | None:
        """Next setting to try; None if there are no more.

        Args:
            tried: the settings so far.
            values: returns the aims of ended settings by number; NaN for failed runs.

        Raises:
            ExperimentError: Optuna is required but not installed.
        """
        number = len(tried)
        seed = self.seeds[0] if self.seeds else 0
        if number >= self.trials:
            return None
        if self.method == "grid":
            return grid(self.space)[number]
        if self.private is not None:  # uniformly, whatever was tried before
            points = grid(self.space)
            draws = choice_stream(load(self.experiment), "setting", number)
            return points[int(draws.integers(len(points)))]
        if self.method == "random":
            return unlike(tried, lambda attempt: drawn(self.space, seed, number, attempt))
        directions = ["minimize" if self.lower_is_better(aim) else "maximize" for aim in self.aims]
        ended = values()
        return unlike(
            tried, lambda attempt: proposed(self.space, seed, directions, tried, ended, attempt)
        )


def plan_of(
    source: str | Path | Mapping[str, Any],
    fixed: Iterable[str] = (),
    vary: Iterable[str] = (),
    *,
    seeds: int = 1,
    trials: int | None = None,
    optimise: Sequence[str] = (),
    choose: Sequence[str] = (),
    private: Law | None = None,
) -> SweepPlan:
    """Plan a sweep from command-line options; all settings of a grid are checked before the first
    run. A private choice has a random number of trials, one split, and a seed per trial.

    Args:
        source: a TOML file, the name of a shipped experiment, or a table.
        fixed: overrides of all runs.
        vary: varied keys and values, see `space_of`.
        seeds: runs per setting, with consecutive seeds from the experiment's.
        trials: number of random settings; default: the grid, or 20 with `optimise`.
        optimise: at most two aims for Optuna's proposals.
        choose: aims for selecting from a grid or from random settings afterwards.
        private: distribution of the number of trials (mean: `trials`) of a private choice.

    Raises:
        ExperimentError: options are inconsistent, or settings would be selected on test users.
    """
    table = read(source, fixed)
    space = space_of(vary := tuple(vary))
    base = load(table)
    aims = tuple(optimise or choose)
    count = 1 if trials is None else trials
    varied = bool(space) or not (optimise or trials)
    one_each = seeds == 1 and len(choose) == 1
    rules = (
        (1 <= seeds <= MOST, f"invalid number of seeds, {seeds}", f"--seeds 3, 1 to {MOST}"),
        (1 <= count <= MOST, f"invalid number of trials, {trials}", f"--trials 20, 1 to {MOST}"),
        (not (optimise and choose), "--optimise and --choose exclude each other", "leave one out"),
        (len(aims) <= 2, f"{len(aims)} metrics, more than two", "leave some out"),
        (varied, "no keys to vary", "--vary KEY=[..] or KEY={low=.., high=..}"),
        (
            private is None or one_each,
            "a private choice needs one metric and one run per trial",
            "--choose hits@10 without --seeds (they are drawn); more trials: --trials",
        ),
    )
    for holds, problem, fix in rules:
        if not holds:
            raise ExperimentError(problem, fix=fix)
    table = {**table, "engine": {"name": "serial", **table.get("engine", {})}}
    method: Method = "optimise" if optimise else "random" if trials else "grid"
    choice = None
    chosen_seeds = range(base.seed, base.seed + seeds)
    if private is not None:
        method = "private"
        choice = RandomTrials(private, trials or TRIALS)
        trials = choice.draw(choice_stream(base, "trials"))
        chosen_seeds = choice_stream(base, "seeds").integers(_SEEDS, size=trials).tolist()
        table["split-seed"] = base.seed_of_split
    points = grid(space) if method in ("grid", "private") else [{}]
    plan = SweepPlan(
        experiment=table,
        vary=vary,
        seeds=tuple(chosen_seeds),
        method=method,
        trials=len(points) if method == "grid" else TRIALS if trials is None else trials,
        aims=aims,
        private=choice,
    )
    for point in points:
        plan.at(point, base.seed)  # raises errors
    return plan


@dataclass(frozen=True)
class _SweepJob(Job):
    """One run of a sweep, in its run folder, which may not exist yet.

    Attributes:
        plan: plan of the sweep.
        trial: number of the setting, from 0.
        point: the setting.
        seed: of the run.
    """

    plan: SweepPlan
    trial: int
    point: Point
    seed: int

    def run(self) -> RunFolder | None:
        """Folder of the run, if it has begun."""
        return RunFolder(self.folder) if (self.folder / "run.json").is_file() else None

    def perform(self, callbacks: Sequence[Callback]) -> None:
        """Run the setting, or the remaining part of its run."""
        if self.run() is None:
            shutil.rmtree(self.folder, ignore_errors=True)  # of an interrupted start
        run_once(self.plan.at(self.point, self.seed), self.folder, callbacks)


class SweepFolder(StudyFolder):
    """A sweep on disk.

    Args:
        path: an existing sweep folder; use `opened` for a new one.

    Attributes:
        failures: errors by name of the runs that ended with one, in this process.

    Raises:
        RunError: `path` is not a sweep, or its files are damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, SWEEP, "sweep")
        self._values: dict[str, dict[str, float]] = {}
        self.failures: dict[str, str] = {}
        try:
            self.plan = SweepPlan.model_validate(self.read(SWEEP))
            self.plan.space  # noqa: B018  # malformed texts are damage, too
        except (ValueError, ExperimentError) as error:
            raise self.damaged(SWEEP, error) from None

    @classmethod
    def opened(cls, path: Path, plan: SweepPlan) -> SweepFolder:
        """Create the folder of a sweep, or open that of the same sweep to continue it. Random or
        proposed settings may be continued with more trials. A private choice retains its first
        number of trials and seeds.

        Raises:
            RunError: `path` has another sweep or other contents.
        """
        asked = plan.model_dump(mode="json")
        free = {"random": ("trials",), "optimise": ("trials",), "private": ("trials", "seeds")}
        folder = StudyFolder(path, SWEEP, "sweep")
        folder.open(asked, free.get(plan.method, ()), secret=plan.private is not None)
        opened = cls(path)
        if plan.private is None and plan.trials > opened.plan.trials:
            opened.write(SWEEP, asked)
            opened.plan = plan
        return opened

    def trials(self) -> list[Point]:
        """Settings tried so far."""
        points = self.read("trials.json") if (self.path / "trials.json").exists() else []
        if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
            raise self.damaged("trials.json", "not a list of settings")
        return points

    def add_trial(self, point: Point) -> None:
        """Save a setting before its first run begins."""
        self.write("trials.json", [*self.trials(), point])

    def jobs(self) -> list[_SweepJob]:
        """Jobs of all settings tried so far. Under private choice each trial has its own seed and
        so its own noise."""
        seeds = self.plan.seeds
        return [
            _SweepJob(self.path / f"runs/{trial + 1:04d}-seed{seed}", self.plan, trial, point, seed)
            for trial, point in enumerate(self.trials())
            for seed in (seeds if self.plan.private is None else seeds[trial : trial + 1])
        ]

    def values(self, job: _SweepJob) -> dict[str, float] | None:
        """Metrics of a finished run, see `_values_of`; None for other runs."""
        if job.name not in self._values:
            run = job.run()
            if run is None or run.status()["state"] != "finished":
                return None
            self._values[job.name] = _values_of(run)
        return self._values[job.name]

    @property
    def published(self) -> bool:
        """True if the run of a private choice is published."""
        return (self.path / CHOSEN / "result.json").is_file()

    def runs(self) -> pd.DataFrame:
        """Table of the runs.

        Returns:
            One row per run: `trial` (from 1), the varied keys, `seed`, `state`, `folder`, metrics
            of finished runs, and `leak` if any run leaks.
        """
        rows = []
        for job in self.jobs():
            run = job.run()
            state = "waiting" if run is None else run.status()["state"]
            row = {"trial": job.trial + 1, **{key: _shown(job.point[key]) for key in job.point}}
            row |= {"seed": job.seed, "state": "failed" if job.name in self.failures else state}
            row |= self.values(job) or {}
            split = read(self.plan.experiment, overrides(job.point)).get("split")
            leaks = isinstance(split, dict) and bool(split.get("leaky-negatives"))
            row |= {LEAK: leaks, "folder": f"runs/{job.name}"}
            rows.append(row)
        head = ["trial", *self.plan.space, "seed", "state", LEAK, "folder"]
        table = pd.DataFrame(rows, columns=None if rows else head)
        return table if any(row[LEAK] for row in rows) else table.drop(columns=LEAK)

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Write runs.csv and settings.csv, and return both, see `runs` and `_setting_rows`."""
        runs = self.runs()
        settings = _setting_rows(list(self.plan.space), runs)
        write_atomically(self.path / "runs.csv", runs.to_csv(index=False), durable=False)
        write_atomically(self.path / "settings.csv", settings.to_csv(), durable=False)
        return runs, settings

    def ended(self) -> dict[int, list[float]]:
        """Mean aims of settings without a run to do, by number, from 0; NaN if a run failed.

        Raises:
            ExperimentError: finished runs do not have an aim.
        """
        runs = self.runs()
        aims = list(self.plan.aims)
        for aim in set(aims) - set(runs.columns) if "finished" in set(runs["state"]) else ():
            known = {name for job in self.jobs() for name in self.values(job) or ()}
            raise unknown("aim", aim, sorted(known))
        means: dict[int, list[float]] = {}
        for trial, group in runs.groupby("trial"):
            if set(group["state"]) <= {"finished", "failed"}:
                numbers = group.reindex(columns=aims).to_numpy(dtype=float)
                means[int(str(trial)) - 1] = numbers.mean(0).tolist()
        return means


def _shown(value: Any) -> int | float | str:
    """Value for a table: numbers and strings unchanged, lists and tables as TOML."""
    return value if isinstance(value, int | float | str) else toml_value(value)


def _setting_rows(keys: Sequence[str], runs: pd.DataFrame) -> pd.DataFrame:
    """Aggregate runs to one row per setting.

    Args:
        keys: the varied keys.
        runs: see `SweepFolder.runs`.

    Returns:
        The varied keys, `runs` (finished), `leak` if `runs` has it, and of each metric the mean
        and, as `METRIC sd`, the standard deviation over seeds, NaN for one seed; index: number of
        the setting, from 1.
    """
    about = ["trial", *keys, "seed", "state", LEAK, "folder"]
    first = runs.drop_duplicates("trial").set_index("trial")
    done = runs[runs["state"] == "finished"].groupby("trial")
    settings = pd.DataFrame(first[list(keys)])
    settings["runs"] = done.size().reindex(settings.index, fill_value=0)
    if LEAK in first:
        settings[LEAK] = first[LEAK]
    for name in runs.columns.difference(about, sort=False):
        settings[name] = done[name].mean()
        settings[f"{name} sd"] = done[name].std()
    return settings


def best(
    settings: pd.DataFrame,
    aims: Sequence[str],
    seeds: int,
    lower: Callable[[str], bool] = lower_is_better,
) -> list[int]:
    """Numbers of the best settings: the best by one aim, or the Pareto front of two, sorted by the
    first aim. Settings with failed runs are excluded."""
    if not aims or not set(aims) <= set(settings.columns):
        return []
    signs = np.array([1.0 if lower(aim) else -1.0 for aim in aims])
    losses = settings[list(aims)].to_numpy(dtype=float) * signs
    complete = (settings["runs"].to_numpy() == seeds) & ~np.isnan(losses).any(1)
    losses = losses[complete]
    front = [
        (*loss.tolist(), int(str(trial)))
        for loss, trial in zip(losses, settings.index[complete], strict=True)
        if not ((losses <= loss).all(1) & (losses < loss).any(1)).any()
    ]
    return [trial for *_, trial in sorted(front)]


@dataclass(frozen=True)
class SweepResult:
    """Results of a sweep.

    Attributes:
        folder: folder of the sweep.
        plan: plan of the sweep.
        runs: one row per run, see `SweepFolder.runs`.
        settings: one row per setting, see `_setting_rows`.
        chosen: numbers of the best settings (Pareto front) by the aims; empty without aims.
        failures: errors by name of the run.
        total: privacy of all runs.
    """

    folder: Path
    plan: SweepPlan
    runs: pd.DataFrame
    settings: pd.DataFrame
    chosen: tuple[int, ...]
    failures: Mapping[str, str]
    total: PrivacyTotal


def sweep(
    plan: SweepPlan,
    output: Path,
    *,
    workers: int = 1,
    ray_address: str | None = None,
    quiet: bool = True,
) -> SweepResult:
    """Run a sweep, or its remaining part.

    Args:
        plan: the sweep.
        output: its folder: a new one, or that of the same sweep.
        workers: number of runs at a time; more than 1 are Ray tasks.
        ray_address: address of a Ray cluster whose machines see `output`; default: a local Ray.
        quiet: whether to print no progress.

    Raises:
        FedrecError: the folder has another sweep, the cost of a private choice is unbounded, or an
            error of data, engine or disk.
    """
    if plan.method == "optimise":
        installed()
    plan.cost  # noqa: B018  # raises errors before the first run
    folder = SweepFolder.opened(output, plan)
    with folder.lock():
        try:
            for _ in execute(
                _remaining(folder),
                folder.failures,
                total=folder.plan.trials * folder.plan.runs_each,
                done=sum(folder.values(job) is not None for job in folder.jobs()),
                describe=lambda job: _main_metrics(folder, job),
                workers=workers,
                address=ray_address,
                device=str(plan.experiment.get("engine", {}).get("device", "auto")),
                quiet=quiet,
            ):
                folder.tables()
        finally:
            with suppress(FedrecError):
                folder.tables()
        return result_of(folder)


def _remaining(folder: SweepFolder) -> Iterator[_SweepJob]:
    """Generate the remaining runs; proposed settings depend on earlier results. After a private
    choice there are no more runs, because another choice would be another release."""
    trial = 0
    while not folder.published:
        tried = folder.trials()
        if trial == len(tried):
            point = folder.plan.next_point(tried, folder.ended)
            if point is None:
                return
            folder.add_trial(point)
        jobs = [job for job in folder.jobs() if job.trial == trial]
        yield from (job for job in jobs if folder.values(job) is None)
        trial += 1


def _main_metrics(folder: SweepFolder, job: _SweepJob) -> str:
    """Most important metrics of a run, as text."""
    aims = folder.plan.aims
    values = folder.values(job) or {}
    names = [name for name in dict.fromkeys([*aims, "hits@10", "rmse", *values]) if name in values]
    return "  ".join(f"{name} {values[name]:.4f}" for name in names[: max(1, len(aims))])


def result_of(folder: SweepFolder) -> SweepResult:
    """Results of a sweep so far; selected settings are written as experiments on the test rows, and
    the run of a private choice is published after the last run."""
    runs, settings = folder.tables()
    plan = folder.plan
    jobs = folder.jobs()
    ended = len(settings) >= plan.trials and set(runs["state"]) <= {"finished", "failed"}
    chosen = best(settings, plan.aims, plan.runs_each, plan.lower_is_better)
    if plan.private is not None:  # ties are exchangeable
        chosen = chosen[:1] if ended or folder.published else []
    for trial in chosen:
        job = next(job for job in jobs if job.trial == trial - 1)
        if plan.cost is not None:
            score = float(settings[plan.aims[0]].to_dict()[trial])
            publish(RunFolder(job.folder), score, plan.cost, folder.path)
            continue
        text = load(plan.at(job.point, job.seed).table(), ["evaluation.held-out=test"]).toml()
        write_atomically(chosen_file(folder.path, trial), text)
    begun = [run for job in jobs if (run := job.run()) is not None]
    total = total_of(begun, chosen=bool(plan.aims))
    return SweepResult(folder.path, plan, runs, settings, tuple(chosen), folder.failures, total)


def chosen_file(folder: Path, trial: int) -> Path:
    """Experiment file of a selected setting, to be evaluated once on the test rows."""
    return folder / f"chosen-{trial:04d}.toml"


def with_sweeps(folders: Sequence[Path]) -> list[Path]:
    """Replace sweeps among run folders by their finished runs, or under private choice by the
    published run.

    Raises:
        RunError: a sweep has no finished run, or its private choice is pending.
    """
    runs: list[Path] = []
    for folder in folders:
        if not (folder / SWEEP).is_file():
            runs.append(folder)
            continue
        private = SweepFolder(folder).plan.private is not None
        pattern = f"{CHOSEN}/result.json" if private else "runs/*/result.json"
        finished = sorted(file.parent for file in folder.glob(pattern))
        if not finished:
            raise RunError(f"{folder} has no finished run", fix=f"fedrec resume {folder}")
        runs += finished
    return runs


def _values_of(run: RunFolder) -> dict[str, float]:
    """Metrics of a finished run, and its epsilon, infinite without privacy.

    If all systems are centralised, the names are `LABEL METRIC`, such as `ease hits@10`.

    Raises:
        RunError: the result is damaged.
    """
    result = run.read_result()
    if not run.experiment.federated:
        return {
            f"{label} {name}": value
            for label, metrics in result.baselines.items()
            for name, value in metrics.items()
        }
    epsilon = result.epsilon
    return {**result.metrics, "epsilon": math.inf if epsilon is None else epsilon}
