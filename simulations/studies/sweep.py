# SPDX-License-Identifier: Apache-2.0
"""Sweeps over settings and seeds of an experiment, with selection of the best setting. Settings are
never selected on test users: a sweep with aims is refused unless it evaluates validation rows. Its
folder:

    sweep.json         experiment, varied keys, seeds, aims
    trials.json        the settings that were tried, in order
    runs/0001-seed0/   run folders: number of the setting, seed
    runs.csv           one row per run: settings, seed, state, metrics
    settings.csv       one row per setting: means over seeds and their standard deviations
    chosen/            under private choice: the published run

Under private choice only the owner can read the folder (mode 0700), because only `chosen/` may be
published.

An interrupted sweep continues its started runs from their checkpoints, and repeats runs that
failed.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedrec.errors import ExperimentError, FedrecError, RunError, unknown
from fedrec.evaluation.tables import lower_is_better
from fedrec.experiment.schema import load, read
from fedrec.report.privacy_total import sweep_total
from fedrec.runs.folder import Result, RunFolder, locked
from fedrec.runtime.files import write_atomically, write_json
from server.callbacks import Callback
from server.checkpoint import Checkpoints, State
from server.evaluation import ending
from simulations.studies.declaration import Job
from simulations.studies.runs import damaged, execute, open_folder, read_part, run_once
from simulations.studies.search import ChoiceCost, Point, SweepPlan, overrides, toml_value

SWEEP = "sweep.json"
CHOSEN = "chosen"
"""Publishable folder of a sweep."""
_PRIVATE = ("created", "command")  # end and location of the sweep
LEAK = "leak"
"""Column of runs in which negatives leaked held-out items (`fedrec.experiment.schema`)."""


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


class SweepFolder:
    """A sweep on disk.

    Args:
        path: an existing sweep folder; use `opened` for a new one.

    Attributes:
        failures: errors by name of the runs that ended with one, in this process.

    Raises:
        RunError: `path` is not a sweep, or its files are damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        self._values: dict[str, dict[str, float]] = {}
        self.failures: dict[str, str] = {}
        try:
            self.plan = SweepPlan.model_validate(read_part(self.path / SWEEP))
            self.plan.space  # noqa: B018  # malformed texts are damage, too
        except (ValueError, ExperimentError) as error:
            raise damaged(self.path / SWEEP, error) from None

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
        secret = plan.private is not None
        opened = cls(
            open_folder(path, SWEEP, "sweep", asked, free.get(plan.method, ()), secret=secret)
        )
        if plan.private is None and plan.trials > opened.plan.trials:
            write_json(opened.path / SWEEP, asked)
            opened.plan = plan
        return opened

    def trials(self) -> list[Point]:
        """Settings tried so far."""
        file = self.path / "trials.json"
        points = read_part(file) if file.exists() else []
        if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
            raise damaged(file, "not a list of settings")
        return points

    def add_trial(self, point: Point) -> None:
        """Save a setting before its first run begins."""
        write_json(self.path / "trials.json", [*self.trials(), point])

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
    def _published(self) -> bool:
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


def _best(
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
        total: total privacy cost of all runs, in words.
    """

    folder: Path
    plan: SweepPlan
    runs: pd.DataFrame
    settings: pd.DataFrame
    chosen: tuple[int, ...]
    failures: Mapping[str, str]
    total: Sequence[str]


def sweep(plan: SweepPlan, output: Path, *, workers: int = 1, quiet: bool = True) -> SweepResult:
    """Run a sweep, or its remaining part.

    Args:
        plan: the sweep.
        output: its folder: a new one, or that of the same sweep.
        workers: number of runs at a time; more than 1 are Ray tasks.
        quiet: whether to print no progress.

    Raises:
        FedrecError: the folder has another sweep, the cost of a private choice is unbounded, or an
            error of data, engine or disk.
    """
    plan.cost  # noqa: B018  # raises errors before the first run
    folder = SweepFolder.opened(output, plan)
    with locked(folder.path):
        try:
            for _ in execute(
                _remaining(folder),
                folder.failures,
                total=folder.plan.trials * folder.plan.runs_each,
                done=sum(folder.values(job) is not None for job in folder.jobs()),
                describe=lambda job: _main_metrics(folder, job),
                workers=workers,
                device=str(plan.experiment.get("engine", {}).get("device", "auto")),
                quiet=quiet,
            ):
                folder.tables()
        finally:
            with suppress(FedrecError):
                folder.tables()
        return _result_of(folder)


def _remaining(folder: SweepFolder) -> Iterator[_SweepJob]:
    """Generate the remaining runs; proposed settings depend on earlier results. After a private
    choice there are no more runs, because another choice would be another release."""
    trial = 0
    while not folder._published:
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


def _result_of(folder: SweepFolder) -> SweepResult:
    """Results of a sweep so far; selected settings are written as experiments on the test rows, and
    the run of a private choice is published after the last run."""
    runs, settings = folder.tables()
    plan = folder.plan
    jobs = folder.jobs()
    ended = len(settings) >= plan.trials and set(runs["state"]) <= {"finished", "failed"}
    chosen = _best(settings, plan.aims, plan.runs_each, plan.lower_is_better)
    if plan.private is not None:  # ties are exchangeable
        chosen = chosen[:1] if ended or folder._published else []
    for trial in chosen:
        job = next(job for job in jobs if job.trial == trial - 1)
        if plan.cost is not None:
            score = float(settings[plan.aims[0]].to_dict()[trial])
            _publish(RunFolder(job.folder), score, plan.cost, folder.path)
            continue
        text = load(plan.at(job.point, job.seed).table(), ["evaluation.held-out=test"]).toml()
        write_atomically(chosen_file(folder.path, trial), text)
    begun = [run for job in jobs if (run := job.run()) is not None]
    total = sweep_total(begun, chosen=bool(plan.aims))
    return SweepResult(folder.path, plan, runs, settings, tuple(chosen), folder.failures, total)


def _publish(run: RunFolder, score: float, cost: ChoiceCost, folder: Path) -> None:
    """Write the published run of a sweep, a run folder with the chosen setting, its parameters, its
    score and the cost of the choice, unless it exists.

    All other files of the chosen run stay private: metrics of rounds and users, the ledger, which
    states the cost of one trial, the times, and the name, which has the trial's number.

    Args:
        run: the chosen, finished run.
        score: its score.
        cost: cost of the choice.
        folder: folder of the sweep.
    """
    state = Checkpoints.of(run).latest()
    if state is None or (folder / CHOSEN / "result.json").is_file():
        return
    shutil.rmtree(folder / CHOSEN, ignore_errors=True)  # of an interrupted start
    target = RunFolder.create(run.experiment, folder / CHOSEN)
    about = {key: value for key, value in target.about.items() if key not in _PRIVATE}
    write_json(target.path / "run.json", about)
    last, parameters = ending(state)
    rounds = [{"round": number + 1, "epsilon": cost.epsilon} for number in range(last)]
    Checkpoints.of(target).save(State(last, parameters))
    target.write_rounds(rounds, [])
    target.set_status("finished", last)
    result = Result(
        experiment=run.experiment,
        folder=target.path,
        metrics={cost.aim: score},
        before_fine_tuning={},
        baselines={},
        rounds=pd.DataFrame(rounds),
        users=pd.DataFrame(index=pd.Index([], dtype="int64", name="client")),
        groups=pd.DataFrame(index=pd.Index([], name="group")),
    )
    privacy = {
        "epsilon": cost.epsilon,
        "delta": cost.delta,
        "method": f"Rényi curve of the best of a random ({cost.choice.law}) number of trials",
        "choice": asdict(cost.choice),
        "in words": cost.lines(),
    }
    target.write_result(result, {"privacy": privacy})


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
