# SPDX-License-Identifier: Apache-2.0
"""The folder of a sweep:

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from fedrec.errors import RunError
from fedrec.runs.folder import FORMAT, RunFolder
from fedrec.runtime.files import read_json
from fedrec.runtime.shared_memory import is_number, number
from server.callbacks.base import Callback
from simulations.studies.declaration import Job
from simulations.studies.private import CHOSEN
from simulations.studies.runs import StudyFolder
from simulations.studies.search import SweepPlan
from simulations.studies.space import Point

SWEEP = "sweep.json"


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
        """Where the run is, or will be."""
        return self.sweep / "runs" / self.name

    def run(self) -> RunFolder | None:
        """The folder of the run, if it has begun."""
        return RunFolder(self.run_path) if (self.run_path / "run.json").is_file() else None

    def perform(self, callbacks: Sequence[Callback]) -> None:
        """Run the setting, or what is left of its run."""
        from simulations import runner

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
            record = self.read(SWEEP)
            if record.get("format") != FORMAT:
                got = f"format {record.get('format', 1)!r}, of another version of fedrec"
                raise self.damaged(SWEEP, got)
            self.plan = SweepPlan.of_record(record)
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
        found = cls(path)
        found._go_on_with(plan)
        return found

    def _go_on_with(self, plan: SweepPlan) -> None:
        known = self.plan.record()
        asked = plan.record()
        longer = plan.method in ("random", "optimise") and plan.trials > self.plan.trials
        drawn = ("trials", "seeds") if plan.private is not None else ()
        free = ("trials",) if longer else drawn
        other = [key for key in known if known[key] != asked.get(key) and key not in free]
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
        found = self.read("trials.json") if (self.path / "trials.json").exists() else []
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise self.damaged("trials.json", "no list of settings")
        return found

    def add_trial(self, point: Point) -> int:
        """Save a setting before its first run begins; returns its number."""
        trials = [*self.trials(), point]
        self.write("trials.json", trials)
        return len(trials) - 1

    def failures(self) -> dict[str, str]:
        """Errors of runs, by name of the run."""
        if not (self.path / "failures.json").exists():
            return {}
        found = self.read("failures.json")
        if not isinstance(found, dict):
            raise self.damaged("failures.json", "no errors by the names of runs")
        return {name: str(text) for name, text in found.items()}

    def set_failure(self, job: SweepJob, text: str | None) -> None:
        """Save the error of a run; None removes it, so that the run is repeated."""
        failures = {name: said for name, said in self.failures().items() if name != job.name}
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


def with_sweeps(folders: Sequence[Path]) -> list[Path]:
    """Run folders, and in place of each sweep its finished runs, or under private choice the
    published one alone.

    Raises:
        RunError: a sweep has no finished run, or has not chosen yet.
    """
    found: list[Path] = []
    for folder in folders:
        if not (folder / SWEEP).is_file():
            found.append(folder)
            continue
        record = StudyFolder(folder, SWEEP, "sweep").read(SWEEP)
        private = isinstance(record, dict) and "private" in record
        runs = f"{CHOSEN}/result.json" if private else "runs/*/result.json"
        finished = sorted(file.parent for file in folder.glob(runs))
        if not finished:
            raise RunError(
                f"{folder} has no finished run",
                expected="a sweep with finished runs",
                got="a private choice that is not made yet"
                if private
                else "a sweep that has just begun",
                fix=f"fedrec resume {folder}",
            )
        found += finished
    return found


def values_of(run: RunFolder) -> dict[str, float]:
    """Metrics of a finished run, and its epsilon, infinite without privacy.

    Of centralised systems alone the names are `LABEL METRIC`, such as `ease hits@10`.

    Raises:
        RunError: its result cannot be read.
    """
    try:
        found = read_json(run.path / "result.json")
        if run.experiment.federated:
            epsilon = float(found.get("privacy", {}).get("epsilon", math.inf))
            return {**_numbers(found["metrics"]), "epsilon": epsilon}
        own = found["baselines"].items()
        return {f"{label} {name}": one for label, ms in own for name, one in _numbers(ms).items()}
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
