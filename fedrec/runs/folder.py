# SPDX-License-Identifier: Apache-2.0
"""The run folder, its lock, and the result of a run.

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
import hashlib
import html
import importlib
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from fedrec.errors import ExperimentError, RunError, unreadable
from fedrec.evaluation.tables import group_gaps
from fedrec.experiment.schema import Experiment, read
from fedrec.runs.ids import environment, installed_version
from fedrec.runtime.files import (
    is_number,
    number,
    read_json,
    require_new_folder,
    write_atomically,
    write_json,
)

# in packages above this library, or that import this module: imported on first use, like
# `fedrec.run`
_SCORING = "simulations.recommending"
_ROWS = "fedrec.report.comparison"
_SHOWN = 5  # metrics of a short table


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """Result of a finished run.

    Attributes:
        experiment: the resolved experiment.
        folder: the run folder.
        metrics: means over the evaluated users, such as `hits@10`, after on-device fine-tuning.
        before_fine_tuning: metrics of the shared parameters; empty without fine-tuning.
        baselines: metrics of each centralised baseline.
        rounds: one row per round.
        users: one row per evaluated user, one column per metric.
        groups: means over groups of users, one row per group.
        parameters: the final global parameters, by name.
        privacy: the privacy cost of the run and its meaning, one paragraph per line; empty without
            `[privacy]`, `[perturb]` and private baselines.
        baseline_users: one table like `users` per centralised baseline.
        baseline_groups: one table like `groups` per centralised baseline.
        early_stopping: with `[early-stopping]`: `metric`, `best`, `best-round`, `rounds`,
            `planned-rounds`, `stopped` and more; `parameters` are those of the best round.
    """

    experiment: Experiment
    folder: Path
    metrics: dict[str, float]
    before_fine_tuning: dict[str, float]
    baselines: dict[str, dict[str, float]]
    rounds: pd.DataFrame
    users: pd.DataFrame
    groups: pd.DataFrame
    parameters: dict[str, Any] = field(default_factory=dict)
    privacy: tuple[str, ...] = ()
    baseline_users: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    baseline_groups: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    early_stopping: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Short text: metrics of all systems, and the run folder."""
        rows = self._systems().to_string(float_format=lambda value: f"{value:.4f}", na_rep="-")
        return f"{self._about()}\n{rows}"

    def _repr_html_(self) -> str:
        """Short HTML table for notebooks."""
        rows = self._systems().to_html(float_format=lambda value: f"{value:.4f}", na_rep="-")
        return f"<p>{html.escape(self._about())}</p>{rows}"

    def _systems(self) -> pd.DataFrame:
        """Table of the first metrics of each system, and epsilon if any has one."""
        rows = importlib.import_module(_ROWS).system_rows(self)
        names = list(next(iter(rows.values()), {}))
        shown = [name for name in self.experiment.evaluation.shown or () if name in names]
        shown = shown or [name for name in names if name != "epsilon"][:_SHOWN]
        if any("epsilon" in row for row in rows.values()):
            shown.append("epsilon")
        return pd.DataFrame.from_dict(rows, orient="index").reindex(columns=shown)

    def _about(self) -> str:
        count = max([len(self.users), *map(len, self.baseline_users.values())], default=0)
        counts = f"{count:,} users tested, {self.rounds_in_words}"
        return f"{self.experiment.name}: {counts}, folder {self.folder}"

    @property
    def epsilon(self) -> float | None:
        """Spent epsilon of the federated system; None without `[privacy]`, infinite if a phase has
        no noise."""
        if self.experiment.privacy is None:
            return None
        spent = self.rounds.get("epsilon")
        return None if spent is None else float(spent.iloc[-1])

    @property
    def rounds_in_words(self) -> str:
        """Number of rounds, with the planned number if training ended earlier."""
        done = len(self.rounds)
        planned = self.experiment.rounds
        count = f"{done:,}" if done == planned else f"{done:,} of {planned:,}"
        return f"{count} round{'' if planned == 1 else 's'}"

    @property
    def best_round(self) -> int:
        """Round of the final parameters: the last one, or the best one of early stopping."""
        return int(self.early_stopping.get("best-round") or len(self.rounds))

    @classmethod
    def load(cls, folder: str | Path) -> Result:
        """Load the result of a finished run, with its final parameters.

        Raises:
            RunError: `folder` is not a run folder, or its run is not finished.
        """
        return importlib.import_module(_SCORING).load_result(folder)

    def recommend(
        self,
        users: Sequence[object] | None = None,
        k: int = 10,
        history: pd.DataFrame | str | Path | None = None,
        new_items: str | Path | None = None,
    ) -> pd.DataFrame:
        """Recommend the best k new items to each user, after on-device fine-tuning if the
        experiment has it.

        Args:
            users: ids as in the data or in the history; None: all users, those of the history if
                there is one.
            k: items per user, at least 1.
            history: further rows, of users of the run or of others, or their file; with the columns
                of the data.
            new_items: file of items that the run did not have, with their vectors or features;
                these alone are ranked, without training.

        Returns:
            One row per recommendation: `user`, `rank` (from 1), `item`, `score`.

        Raises:
            DataError: a user is not in the data, users or items of the run are no longer there, or
                the history is damaged.
            ExperimentError: the run has no federated system, no parameters, or none for a new user.
        """
        return importlib.import_module(_SCORING).recommend(self, users, k, history, new_items)

    def scores(self, users: Sequence[object] | None = None) -> pd.DataFrame:
        """Scores of the whole catalogue, one row per user and one column per item, by the data's
        ids.

        Raises:
            DataError: see `recommend`.
            ExperimentError: see `recommend`.
        """
        return importlib.import_module(_SCORING).scores(self, users)

    @property
    def gaps(self) -> pd.DataFrame:
        """Gaps between groups of users, one row per kind of group, as from `group_gaps`."""
        return group_gaps(self.groups)


# Tables of a run folder, verified by their digests.

_USER = "user"
"""Column of users.csv with the data's ids."""
_UNREADABLE = (ValueError, IndexError, OverflowError)  # those of pandas: ValueErrors
"""Exceptions raised by reading a damaged table."""
_TABLES = ("rounds.csv", "**/users.csv", "**/groups.csv")


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each table of a run folder, by its path within the folder."""
    files = sorted(file for pattern in _TABLES for file in folder.glob(pattern))
    return {str(file.relative_to(folder)): _sha256(file.read_bytes()) for file in files}


def _read_content(folder: Path, name: str) -> bytes:
    """Read the file of a table of a run folder; if the run is finished, verify its digest in
    result.json.

    Args:
        folder: folder of the run.
        name: path of the table within the folder.

    Raises:
        OSError, ValueError: the file cannot be read, or was changed after it was written.
    """
    content = (folder / name).read_bytes()
    result = folder / "result.json"
    about = read_json(result) if result.is_file() else {}
    tables = about.get("tables", {}) if isinstance(about, dict) else None
    if not isinstance(tables, dict):
        raise ValueError("result.json has no digests by name under 'tables'")
    if tables.get(name) not in (None, _sha256(content)):
        raise ValueError("the file was changed after the run wrote it")
    return content


def _table_of(content: bytes, index: int | None = None) -> pd.DataFrame:
    """Parse the content of a table's file.

    Args:
        content: content of the file.
        index: column of row names; other columns must be numbers, except the data's ids of users,
            which are dropped; None: no such column.

    Raises:
        `_UNREADABLE`: not a table, or text in a column of numbers.
    """
    table = pd.read_csv(io.BytesIO(content), index_col=index)
    if index is not None:
        table = table.drop(columns=_USER, errors="ignore")
    text = [column for column in table.columns if not is_numeric_dtype(table[column])]
    if index is not None and len(table) and text:
        raise ValueError(f"text in numeric column {text[0]!r}")
    return table


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
        path = path.expanduser().resolve()
        resume = f"fedrec resume {quote(str(path))}; or choose another --output"
        fix = resume if (path / "run.json").is_file() else "choose another --output"
        require_new_folder(path, fix=fix, usable=_never_began)
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

    @cached_property
    def experiment(self) -> Experiment:
        """Experiment of this run.

        Raises:
            RunError: it was changed after the run was started.
        """
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
        toml = quote(str(self.path / "experiment.toml"))
        here = installed_version("fedrec")
        return RunError(
            f"{self.path} was written by another fedrec ({self.about.get('fedrec')})",
            expected=f"a run folder of format {FORMAT}, with settings of fedrec {here}",
            got=got,
            fix="read it with that version, whose commit is in environment.json; or run its"
            " experiment again, with the settings of this version in a copy of it:"
            f" fedrec run {toml}",
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
            "rounds": len(result.rounds),
            "users": len(result.users),
            "metrics": result.metrics,
            "metrics-before-fine-tuning": result.before_fine_tuning,
            "baselines": result.baselines,
            "tables": _digests(self.path),
            **extra,
        }
        write_json(self.path / "result.json", summary)

    def _with_ids(self, users: pd.DataFrame) -> pd.DataFrame:
        """Insert the data's user ids as first column of a table."""
        ids = self.user_ids()
        if ids is None:
            return users
        return users.assign(**{_USER: ids[users.index]}).reindex(columns=[_USER, *users.columns])

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
            return _table_of(_read_content(self.path, name), index)
        except (OSError, *_UNREADABLE) as error:
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
