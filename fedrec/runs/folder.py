# SPDX-License-Identifier: Apache-2.0
"""The run folder, and its lock.

The run folder: everything needed to read, compare, resume and reproduce one execution of an
experiment.

    experiment.toml    the resolved experiment, every default filled in
    run.json           fedrec's version, digest of the experiment, command, time of creation
    environment.json   versions and machine
    status.json        running, finished, interrupted or failed, and the last complete round
    rounds.csv         one row per round; the same seed gives the same bytes on the same engine and
                       number of nodes
    timings.csv        seconds per round, separate from rounds.csv because they vary between runs;
                       none in mode `secure`
    baselines/NAME/    a centralised baseline: result.json, users.csv (metrics of each user),
                       groups.csv, privacy.jsonl (its charges)
    users.csv          metrics of each evaluated user after the last round; `client` is its number,
                       `user` the data's id where the data are known
    groups.csv         the same, averaged over groups of users
    epsilons.csv       true and requested epsilon of each user, if users add noise of their own
    result.json        metrics of the system and of its baselines
    log.txt            log messages
    checkpoints/       the state after the last rounds
    private/           private state of the clients, one file per node; of an unfinished run in mode
                       `secure` also the noise that later rounds take back

Every file is written atomically.
"""

from __future__ import annotations

import csv
import fcntl
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pandas as pd

from fedrec.errors import ExperimentError, RunError, unreadable
from fedrec.experiment.schema import Experiment
from fedrec.runs.ids import environment, installed_version
from fedrec.runs.result import UNREADABLE, USER, Result, digests, read_content, table_of
from fedrec.runtime.files import (
    is_number,
    number,
    read_json,
    require_new_folder,
    write_atomically,
    write_json,
)

# One process at a time in a folder.


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an existing folder against a second writing process.

    Raises:
        RunError: another process holds the lock, or its file cannot be opened.
    """
    path = folder / ".lock"
    try:
        file = path.open("w")
    except OSError as error:
        fix = f"make the folder writable; if {path} is a folder, remove it"
        raise RunError(f"{folder} cannot be locked", got=str(error), fix=fix) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            problem = f"{folder} is in use by a run in progress in another process"
            raise RunError(problem, fix="wait for it, or stop it") from None
        yield


FORMAT = 2
"""Version of the run folder, in run.json. Older folders (format 1 or none) have other names of
metrics and raise an error."""
Row = dict[str, Any]
_BEFORE_RUN = ("environment.json", "experiment.toml")  # written before run.json, in this order
TIED_SHARE = "share-of-rows-with-tied-times"  # in result.json


class RunFolder:
    """A run folder on disk.

    Args:
        path: an existing run folder; use `create` for a new one.

    Raises:
        RunError: `path` is not a run folder, or its experiment was changed after the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        if not (self.path / "run.json").is_file() or not (self.path / "experiment.toml").is_file():
            other = "another folder" if self.path.is_dir() else "no such folder"
            raise RunError(
                f"{path} is not a run folder",
                expected="a folder with run.json and experiment.toml",
                got="a file" if self.path.is_file() else other,
                fix="give the folder that `fedrec run` printed",
            )
        self.user_ids: Callable[[], np.ndarray | None] = lambda: None
        """Ids of users in the data, `[users]`, for users.csv; None if this process has not read the
        data. Set by the runner."""

    @classmethod
    def create(cls, experiment: Experiment, path: Path) -> RunFolder:
        """Create the folder of a new run.

        Raises:
            RunError: `path` exists already.
        """
        path = cls.require_new(path)
        write_json(path / "environment.json", environment())
        write_atomically(path / "experiment.toml", experiment.toml())
        started = datetime.now(UTC).isoformat(timespec="seconds")
        about = {
            "format": FORMAT,
            "fedrec": installed_version("fedrec"),
            "experiment-sha256": experiment.digest(),
            "created": started,
        }
        write_json(path / "run.json", {**about, "command": sys.argv})
        folder = cls(path)
        folder.experiment = experiment
        return folder

    @staticmethod
    def require_new(path: Path) -> Path:
        """Check that a new run may use a folder, and return its absolute path.

        Raises:
            RunError: it holds something.
        """
        path = path.expanduser().resolve()
        resume = f"fedrec resume {quote(str(path))}; or fedrec run with --overwrite, to start again"
        fix = resume if (path / "run.json").is_file() else "choose another --output"
        require_new_folder(path, fix=fix, usable=_never_began)
        return path

    @cached_property
    def experiment(self) -> Experiment:
        """Experiment of this run.

        Raises:
            RunError: it was changed after the run was started.
        """
        from fedrec.experiment.loading import read

        version = self.about.get("format", 1)
        if version != FORMAT:
            raise self._of_another_version(f"run folder of format {version!r}")
        # It was resolved when written, so its components need not be imported to read it.
        try:
            experiment = Experiment.parse(read(self.path / "experiment.toml"))
        except ExperimentError as error:
            raise self._of_another_version(str(error)) from error
        if experiment.digest() not in self.digests:
            if self.about.get("fedrec") != installed_version("fedrec"):
                raise self._of_another_version("settings with other defaults, or an edit")
            raise RunError(
                f"{self.path / 'experiment.toml'} was changed after the run was started",
                expected=f"digest {self.digests[0]}",
                got=f"digest {experiment.digest()}",
                fix="undo the change, or start a new run with `fedrec run`",
            )
        return experiment

    def _of_another_version(self, got: str) -> RunError:
        """Create the error for a folder that this version cannot read."""
        written = self.about.get("fedrec") or "another version"
        here = installed_version("fedrec")
        toml = quote(str(self.path / "experiment.toml"))
        # versions between two releases have the same number
        commit = str(self._read_json("environment.json", {}).get("commit") or "unknown").rstrip("+")
        reader = f"pip install 'fedrec=={written}'" if written != here else f"git checkout {commit}"
        return RunError(
            f"{self.path} was written by another fedrec ({written}, commit {commit})",
            expected=f"a run folder of format {FORMAT}, with settings of fedrec {here}",
            got=got,
            fix=f"read it with that version: {reader}; or run its experiment again, with the"
            f" settings of this version in a copy of it: fedrec run {toml}",
        )

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the experiment: the current one first, then those before amendments."""
        about = self.about
        earlier = about.get("earlier-sha256", [])
        if not isinstance(earlier, list):
            raise self._damaged("run.json", "earlier-sha256 is not a list of digests")
        return (str(about.get("experiment-sha256")), *map(str, earlier))

    @property
    def has_rounds(self) -> bool:
        """True if a round is complete."""
        return self.status()["round"] > 0 or any(self.path.glob("checkpoints/round-*"))

    @property
    def has_progress(self) -> bool:
        """True if there is progress to resume: a round, a baseline, a charge."""
        progress = ("baselines/*/result.json", "**/privacy.jsonl", "private/*")
        return self.has_rounds or any(any(self.path.glob(pattern)) for pattern in progress)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def log_file(self) -> Path:
        """Path of the log."""
        return self.path / "log.txt"

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder against a second writing process.

        Raises:
            RunError: another process holds the lock.
        """
        return locked(self.path)

    def status(self) -> dict[str, Any]:
        """State of the run (`state`: running, finished, interrupted, failed; `round`: last
        complete)."""
        status = self._read_json("status.json", {"state": "created", "round": 0})
        number = status.get("round")
        if not isinstance(status.get("state"), str) or type(number) is not int or number < 0:
            raise self._damaged("status.json", "state or round number missing")
        return status

    def set_status(self, state: str, round_number: int) -> None:
        """Write the state of the run; once finished, the saved noise of its rounds is deleted."""
        durable = state != "running"  # the progress of a running run is in its checkpoints
        table = {"state": state, "round": round_number}
        write_json(self.path / "status.json", table, durable=durable)
        if state == "finished":
            for file in self.path.glob("private/*noise-*"):  # also partly written ones
                file.unlink()

    def write_rounds(self, rounds: list[Row], timings: list[Row]) -> None:
        """Write all rounds so far, and their times if there are any."""
        for name, rows in (("rounds.csv", rounds), ("timings.csv", timings)):
            if rows:  # they are also in the checkpoint
                text = io.StringIO()
                columns = dict.fromkeys(name for row in rows for name in row)
                writer = csv.DictWriter(text, [*columns], lineterminator="\n")
                writer.writeheader()
                # NaN is an empty cell
                writer.writerows({k: v for k, v in row.items() if v == v} for row in rows)
                write_atomically(self.path / name, text.getvalue(), durable=False)

    def timings(self) -> pd.DataFrame:
        """Read the seconds of each round: `round`, `seconds`, `train`, `evaluate`."""
        return self._read_table("timings.csv")

    def read_rounds(self) -> pd.DataFrame:
        """Read the table of complete rounds; empty before the first.

        Raises:
            RunError: the table is damaged.
        """
        if not (self.path / "rounds.csv").exists():
            return pd.DataFrame()
        return self._read_table("rounds.csv")

    def read_baselines(self) -> dict[str, dict[str, float]]:
        """Read the metrics of the baselines that are computed; a baseline without rating
        predictions has none in rating experiments and is left out."""
        labels = self.experiment.evaluation.baseline_settings()
        saved = ((label, self.read_baseline(label)) for label in labels)
        return {label: result["metrics"] for label, result in saved if result and result["metrics"]}

    def baseline_folder(self, label: str) -> Path:
        """Folder of one centralised baseline."""
        return self.path / "baselines" / label.replace(":", ".")

    def read_baseline(self, label: str) -> dict[str, Any] | None:
        """Read results of one baseline (`metrics`, `seconds`, `privacy`); None if it is not
        finished."""
        file = f"baselines/{self.baseline_folder(label).name}/result.json"
        if not (self.path / file).exists():
            return None
        result = self._read_json(file)
        if not isinstance(result.get("privacy", {}), dict):
            raise self._damaged(file, "no table under privacy")
        seconds = self._metrics(result.get("seconds", {}), file)
        return result | {"metrics": self._metrics(result.get("metrics"), file), "seconds": seconds}

    def write_baseline(
        self, label: str, result: dict[str, Any], users: pd.DataFrame, groups: pd.DataFrame
    ) -> None:
        """Store one baseline for a resumed run: users.csv, groups.csv and, last, result.json."""
        folder = self.baseline_folder(label)
        write_atomically(folder / "users.csv", self._with_ids(users).to_csv())
        write_atomically(folder / "groups.csv", groups.to_csv())
        write_json(folder / "result.json", result)

    def result(self, **tables: Any) -> Result:
        """Make the result of the run from its tables (attributes of `Result`) and from what the
        folder has of its centralised baselines."""
        baselines = self.read_baselines()
        users, groups = (self._of_baselines(baselines, name) for name in ("users", "groups"))
        return Result(
            experiment=self.experiment,
            folder=self.path,
            baselines=baselines,
            baseline_users=users,
            baseline_groups=groups,
            **tables,
        )

    def _of_baselines(self, labels: Iterable[str], name: str) -> dict[str, pd.DataFrame]:
        files = {label: self.baseline_folder(label) / f"{name}.csv" for label in labels}
        return {
            label: self._read_table(str(file.relative_to(self.path)), index=0)
            for label, file in files.items()
            if file.exists()
        }

    def write_result(self, result: Result, extra: dict[str, Any]) -> None:
        """Write users.csv, groups.csv and, last, result.json."""
        write_atomically(self.path / "users.csv", self._with_ids(result.users).to_csv())
        write_atomically(self.path / "groups.csv", result.groups.to_csv())
        summary = {
            "experiment": self.experiment.name,
            "experiment-sha256": self.experiment.digest(),
            "seed": self.experiment.seed,
            "rounds": result.num_rounds,
            "users": len(result.users),
            "metrics": result.metrics,
            "metrics-before-fine-tuning": result.before_fine_tuning,
            "baselines": result.baselines,
            "tables": digests(self.path),
            **extra,
        }
        write_json(self.path / "result.json", summary)

    def _with_ids(self, users: pd.DataFrame) -> pd.DataFrame:
        """Insert the data's user ids as first column of a table."""
        ids = self.user_ids()
        if ids is None:
            return users
        return users.assign(**{USER: ids[users.index]}).reindex(columns=[USER, *users.columns])

    def summary(self) -> dict[str, Any]:
        """Content of result.json, such as `metrics`, `seconds`, `cost` and `privacy`; empty before
        the run is finished.

        Raises:
            RunError: the file is damaged.
        """
        return self._read_json("result.json", {})

    @property
    def about(self) -> dict[str, Any]:
        """Content of run.json: `fedrec`, `experiment-sha256`, `created`, `command`."""
        return self._read_json("run.json")

    @property
    def environment(self) -> dict[str, Any]:
        """Machine and packages of the run, see `fedrec.runs.ids`."""
        return self._read_json("environment.json")

    def read_result(self) -> Result:
        """Read the result of a finished run, without `parameters`.

        Raises:
            RunError: the run is not finished.
        """
        summary = self.summary()
        if not summary:
            raise RunError(
                f"{self.path} has no result",
                got=f"a run that is {self.status()['state']} after round {self.status()['round']}",
                fix=f"fedrec resume {quote(str(self.path))}",
            )
        reports = [table for table in summary.values() if isinstance(table, dict)]
        texts = [report.get("in words", []) for report in reports]
        if not all(isinstance(lines, list) for lines in texts):
            raise self._damaged("result.json", "a report that is not in words")
        return self.result(
            metrics=self._metrics(summary.get("metrics"), "result.json"),
            before_fine_tuning=self._metrics(
                summary.get("metrics-before-fine-tuning"), "result.json"
            ),
            rounds=self._read_table("rounds.csv") if self.experiment.federated else pd.DataFrame(),
            users=self._read_table("users.csv", index=0),
            groups=self._read_table("groups.csv", index=0),
            privacy=tuple(str(line) for lines in texts for line in lines),
            early_stopping=summary.get("early-stopping", {}),
        )

    def _metrics(self, metrics: object, name: str) -> dict[str, float]:
        """Restore metrics from their JSON form."""
        if not isinstance(metrics, dict) or not all(map(is_number, metrics.values())):
            raise self._damaged(name, "metrics are not numbers by name")
        return {metric: number(value) for metric, value in metrics.items()}

    def _read_table(self, name: str, index: int | None = None) -> pd.DataFrame:
        try:
            return table_of(read_content(self.path, name), index)
        except (OSError, *UNREADABLE) as error:
            raise self._damaged(name, error) from None

    def _read_json(self, name: str, missing: dict[str, Any] | None = None) -> dict[str, Any]:
        """Read a JSON object from a file; return `missing` if the file does not exist."""
        if missing is not None and not (self.path / name).exists():
            return missing
        try:
            table = read_json(self.path / name)
        except (OSError, ValueError) as error:
            raise self._damaged(name, error) from None
        if not isinstance(table, dict):
            raise self._damaged(name, f"{type(table).__name__} instead of an object")
        return table

    def _damaged(self, name: str, got: object) -> RunError:
        fix = "restore it from a backup; an unfinished run can be resumed from its checkpoints"
        return unreadable(self.path / name, got, fix)


def _never_began(folder: Path) -> bool:
    """True if a folder is empty, or its run was killed before it wrote run.json."""
    names = sorted(file.name.lstrip(".") for file in folder.iterdir())
    started = not names or names[0].startswith(_BEFORE_RUN[0])
    return started and all(name.startswith(_BEFORE_RUN) for name in names)
