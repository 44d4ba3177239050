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
    timings.csv        seconds per round, apart from rounds.csv because they differ in every run;
                       none in mode `secure`
    baselines.json     metrics of the centralised baselines
    baselines/NAME/    one of them: result.json, users.csv (metrics of each user), groups.csv,
                       privacy.jsonl (its charges)
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
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, TextIO

import numpy as np
import pandas as pd

from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.schema import Experiment
from fedrec.runs.ids import environment, installed_version
from fedrec.runs.result import (
    RENAMED,
    UNREADABLE,
    USER,
    Result,
    digests,
    present_names,
    read_content,
    table_of,
    written_names,
)
from fedrec.runtime.files import (
    MOST_JSON,
    parse_json,
    read_json,
    require_new_folder,
    write_atomically,
)
from fedrec.runtime.shared_memory import finite, is_number, number

# One process at a time in a folder.


@contextmanager
def locked(folder: Path, *, expected: str, got: str, fix: str) -> Iterator[None]:
    """Lock a folder against a second writing process.

    Args:
        folder: an existing folder.
        expected: text of the error, like `got` and `fix`.

    Raises:
        RunError: another process holds it, or its file cannot be opened.
    """
    with _opened(folder / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{folder} is in use", expected=expected, got=got, fix=fix) from None
        yield


def _opened(path: Path) -> TextIO:
    try:
        return open(path, "w")
    except OSError as error:
        raise RunError(
            f"{path.parent} cannot be locked",
            expected=f"a file {path.name} that can be written, or none",
            got=error.strerror or str(error),
            fix=f"make the folder writable; if {path} is a folder, remove it",
        ) from None


FORMAT = RENAMED
"""Version of the run folder, in run.json; folders without one are read as 1."""
Row = dict[str, Any]
_BEFORE_RUN = ("environment.json", "experiment.toml")  # written before run.json, in this order
_SAID = (
    *("leak", "perturb", "adversary", "strategy", "personal", "privacy", "early-stopping"),
    *("baselines-privacy", "replies"),
)
TIED_SHARE = "share-of-rows-with-tied-times"  # in result.json
_METRICS = ("metrics", "metrics-before-fine-tuning", "baselines")  # in result.json


class RunFolder:
    """One run folder on disk.

    Args:
        path: an existing run folder; use `create` for a new one.

    Raises:
        RunError: `path` is not a run folder, or its experiment was changed after the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        if not (self.path / "run.json").is_file() or not (self.path / "experiment.toml").is_file():
            raise RunError(
                f"{path} is not a run folder",
                expected="a folder with run.json and experiment.toml",
                got=(
                    "a file"
                    if self.path.is_file()
                    else "no such folder"
                    if not self.path.exists()
                    else "another folder"
                ),
                fix="give the folder that `fedrec run` printed",
            )
        self._tables: dict[str, _Written] = {}
        self.user_ids: Callable[[], np.ndarray | None] = lambda: None
        """The data's ids of users by their numbers, `[users]`, for users.csv; None where this
        process has not read the data. Set by who runs it."""

    @classmethod
    def create(cls, experiment: Experiment, path: Path) -> RunFolder:
        """Create the folder of a new run.

        Raises:
            RunError: `path` exists already.
        """
        path = cls.require_new(path)
        write_atomically(path / "environment.json", _json(environment()))
        write_atomically(path / "experiment.toml", experiment.toml())
        started = datetime.now(UTC).isoformat(timespec="seconds")
        about = {
            "format": FORMAT,
            "fedrec": installed_version("fedrec"),
            "experiment-sha256": experiment.digest(),
            "created": started,
        }
        write_atomically(path / "run.json", _json({**about, "command": sys.argv}))
        folder = cls(path)
        folder.experiment = experiment
        return folder

    @staticmethod
    def require_new(path: Path) -> Path:
        """The absolute path of a folder that a new run may have.

        Raises:
            RunError: it holds something.
        """
        path = path.expanduser().resolve()
        resume = f"fedrec resume {quote(str(path))}; or fedrec run with --overwrite, to begin anew"
        known = (path / "run.json").is_file()
        require_new_folder(
            path, fix=resume if known else "choose another --output", usable=_never_began
        )
        return path

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment of this run.

        Raises:
            RunError: it differs from the one that the run was started with.
        """
        from fedrec.experiment.loading import read

        self._refuse_newer()
        # It was resolved when written, so its components need not be imported to read it.
        try:
            written = Experiment.parse(read(self.path / "experiment.toml"))
            experiment = written
            if self.version < RENAMED:
                text = self.present(json.dumps(written.table()))
                experiment = Experiment.parse(parse_json(text, MOST_JSON))
        except ExperimentError as error:
            raise self._of_another_version(str(error)) from error
        if not {written.digest(), experiment.digest()} & {*self.digests}:
            if self.about.get("fedrec") != installed_version("fedrec"):
                raise self._of_another_version("settings that have other defaults now, or an edit")
            raise RunError(
                f"{self.path / 'experiment.toml'} was changed after the run was started",
                expected=f"digest {self.digests[0]}",
                got=f"digest {experiment.digest()}",
                fix="undo the change, or start a new run with `fedrec run`",
            )
        return experiment

    def _refuse_newer(self) -> None:
        """Refuse a folder that a later version wrote in another form."""
        found = self.about.get("format", 1)
        if type(found) is not int or found > FORMAT:
            raise self._of_another_version(f"run folder of format {found!r}")

    @cached_property
    def version(self) -> int:
        """The format of this folder."""
        found = self.about.get("format", 1)
        return found if type(found) is int else FORMAT

    def present(self, text: str) -> str:
        """A text of this folder with the present names of metrics."""
        return present_names(text, self.version)

    def written(self, text: str) -> str:
        """A text with the names that metrics have in this folder."""
        return written_names(text, self.version)

    def _of_another_version(self, got: str) -> RunError:
        """The error for a folder that this version cannot read."""
        written = self.about.get("fedrec") or "another version"
        here = installed_version("fedrec")
        toml = quote(str(self.path / "experiment.toml"))
        return RunError(
            f"{self.path} was written by fedrec {written} and cannot be read",
            expected=f"a run folder of format {FORMAT} or before, with settings of fedrec {here}",
            got=got,
            fix=f"pip install 'fedrec=={written}' reads it; or run its experiment again, with the"
            f" settings of this version in a copy of it: fedrec run {toml}",
        )

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the experiment: the current one first, then those before amendments."""
        about = self.about
        earlier = about.get("earlier-sha256", [])
        if not isinstance(earlier, list):
            raise self._damaged("run.json", "no list of digests under earlier-sha256")
        return (str(about.get("experiment-sha256")), *map(str, earlier))

    @property
    def has_rounds(self) -> bool:
        """Whether a round is complete."""
        return self.status()["round"] > 0 or any(self.path.glob("checkpoints/round-*"))

    @property
    def has_progress(self) -> bool:
        """Whether a resumed run would keep anything: a round, a baseline, a charge."""
        kept = ("baselines/*/result.json", "**/privacy.jsonl", "private/*")
        return self.has_rounds or any(any(self.path.glob(pattern)) for pattern in kept)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def log_file(self) -> Path:
        """The log."""
        return self.path / "log.txt"

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder against a second writing process.

        Raises:
            RunError: another process holds it.
        """
        return locked(
            self.path,
            expected="one process per run folder",
            got="another process that is running it",
            fix="wait for it, or stop it",
        )

    def status(self) -> dict[str, Any]:
        """State of the run (`state`: running, finished, interrupted, failed; `round`: last complete
        one)."""
        if not (self.path / "status.json").exists():
            return {"state": "created", "round": 0}
        found = self._read_json("status.json")
        if (
            not isinstance(found.get("state"), str)
            or type(found.get("round")) is not int
            or found["round"] < 0
        ):
            raise self._damaged("status.json", "no state, or no number of a round")
        return found

    def set_status(self, state: str, round_number: int) -> None:
        """Write the state of the run; a finished one drops the noise of its rounds."""
        durable = state != "running"  # the progress of a running run is in its checkpoints
        text = _json({"state": state, "round": round_number})
        write_atomically(self.path / "status.json", text, durable=durable)
        if state == "finished":
            for file in self.path.glob("private/*noise-*"):  # also one whose writing was broken off
                file.unlink()

    def write_rounds(self, rounds: list[Row], timings: list[Row]) -> None:
        """Write all rounds so far, and their times if there are any."""
        # they are also in the checkpoint
        tables = (("rounds.csv", rounds), ("timings.csv", timings))
        for name, rows in tables:
            if rows:
                table = self._tables[name] = _Written.of(rows, self._tables.get(name))
                write_atomically(self.path / name, self.written(table.text), durable=False)

    def timings(self) -> pd.DataFrame:
        """Seconds of each round, one row per round: `round`, `seconds`, `train`, `evaluate`."""
        return self._read_table("timings.csv")

    def read_rounds(self) -> pd.DataFrame:
        """One row per complete round; empty before the first.

        Raises:
            RunError: the table is damaged.
        """
        if not (self.path / "rounds.csv").exists():
            return pd.DataFrame()
        return self._read_table("rounds.csv")

    def read_baselines(self) -> dict[str, dict[str, float]] | None:
        """Metrics of the baselines, if they have been computed."""
        if not (self.path / "baselines.json").exists():
            return None
        found = self._read_json("baselines.json")
        if not all(_are_metrics(own) for own in found.values()):
            raise self._damaged("baselines.json", "something else than numbers by name")
        return {label: _numbers(own) for label, own in found.items()}

    def write_baselines(self, metrics: dict[str, dict[str, float]]) -> None:
        """Store the metrics of the baselines for a resumed run."""
        write_atomically(self.path / "baselines.json", self.written(_json(metrics)))

    def baseline_folder(self, label: str) -> Path:
        """Folder of one centralised baseline."""
        return self.path / "baselines" / label.replace(":", ".")

    def read_baseline(self, label: str) -> dict[str, Any] | None:
        """Results of one baseline (`metrics`, `seconds`, `privacy` of a private one); None if it is
        not finished."""
        file = f"baselines/{self.baseline_folder(label).name}/result.json"
        if not (self.path / file).exists():
            return None
        found = self._read_json(file)
        if not _are_metrics(found.get("metrics")) or not isinstance(found.get("privacy", {}), dict):
            raise self._damaged(file, "no numbers by name under metrics")
        return found | {"metrics": _numbers(found["metrics"])}

    def write_baseline(
        self, label: str, found: dict[str, Any], users: pd.DataFrame, groups: pd.DataFrame
    ) -> None:
        """Store one baseline for a resumed run: users.csv, groups.csv and, last, result.json."""
        texts = {
            "users.csv": self._with_ids(users).to_csv(),
            "groups.csv": groups.to_csv(),
            "result.json": _json(found),
        }
        for name, text in texts.items():
            write_atomically(self.baseline_folder(label) / name, self.written(text))

    def baseline_users(self) -> dict[str, pd.DataFrame]:
        """Metrics of each user by each centralised baseline, by label."""
        return self._of_baselines("users.csv")

    def baseline_groups(self) -> dict[str, pd.DataFrame]:
        """Means over groups of users by each centralised baseline, by label."""
        return self._of_baselines("groups.csv")

    def _of_baselines(self, name: str) -> dict[str, pd.DataFrame]:
        folders = {label: self.baseline_folder(label) for label in self.read_baselines() or {}}
        return {
            label: self._read_table(str((folder / name).relative_to(self.path)), index=0)
            for label, folder in folders.items()
            if (folder / name).exists()
        }

    def write_result(self, result: Result, extra: dict[str, Any]) -> None:
        """Write users.csv, groups.csv and, last, result.json."""
        users = self._with_ids(result.users).to_csv()
        write_atomically(self.path / "users.csv", self.written(users))
        write_atomically(self.path / "groups.csv", self.written(result.groups.to_csv()))
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
        write_atomically(self.path / "result.json", self.written(_json(summary)))

    def _with_ids(self, users: pd.DataFrame) -> pd.DataFrame:
        """A table of users, with the data's ids in its first column."""
        ids = self.user_ids()
        if ids is None:
            return users
        return users.assign(**{USER: ids[users.index]}).reindex(columns=[USER, *users.columns])

    def summary(self) -> dict[str, Any]:
        """All of result.json, such as `metrics`, `seconds`, `cost` and `privacy`; empty before the
        run is finished.

        Raises:
            RunError: it is damaged.
        """
        return self._read_json("result.json") if (self.path / "result.json").is_file() else {}

    @property
    def about(self) -> dict[str, Any]:
        """All of run.json: `fedrec`, `experiment-sha256`, `created`, `command`."""
        return self._read_json("run.json", renamed=False)

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and the packages of the run, see `fedrec.runs.ids`."""
        return self._read_json("environment.json")

    def read_result(self) -> Result:
        """The result of a finished run; `parameters` is left empty.

        Raises:
            RunError: the run is not finished.
        """
        summary = self.summary()
        if not summary:
            raise RunError(
                f"{self.path} has no result",
                expected="a finished run",
                got=f"a run that is {self.status()['state']} after round {self.status()['round']}",
                fix=f"fedrec resume {quote(str(self.path))}",
            )
        metrics, before, baselines = (summary.get(key) for key in _METRICS)
        if not _are_metrics(metrics) or not _are_metrics(before) or not isinstance(baselines, dict):
            raise self._damaged("result.json", f"no numbers by name under {', '.join(_METRICS)}")
        if not all(_are_metrics(own) for own in baselines.values()):
            raise self._damaged("result.json", "baselines without numbers by name")
        parts = [summary.get(part, {}) for part in _SAID]
        said = [part.get("in words", []) if isinstance(part, dict) else None for part in parts]
        if not all(isinstance(lines, list) for lines in said):
            raise self._damaged("result.json", "an account that is not in words")
        return Result(
            experiment=self.experiment,
            folder=self.path,
            metrics=_numbers(metrics),  # type: ignore[arg-type]
            before_fine_tuning=_numbers(before),  # type: ignore[arg-type]
            baselines={label: _numbers(own) for label, own in baselines.items()},
            rounds=self._read_table("rounds.csv") if self.experiment.federated else pd.DataFrame(),
            users=self._read_table("users.csv", index=0),
            groups=self._read_table("groups.csv", index=0),
            baseline_users=self.baseline_users(),
            baseline_groups=self.baseline_groups(),
            privacy=tuple(str(line) for lines in said for line in lines or ()),
            early_stopping=summary.get("early-stopping", {}),
        )

    def _read_table(self, name: str, index: int | None = None) -> pd.DataFrame:
        try:
            return table_of(self._content(name), index)
        except UNREADABLE as error:
            raise self._unreadable(name, error) from None

    def _content(self, name: str) -> bytes:
        try:
            content = read_content(self.path, name)
            return content if self.version >= RENAMED else self.present(content.decode()).encode()
        except (OSError, ValueError) as error:
            raise self._unreadable(name, error) from None

    def _unreadable(self, name: str, error: Exception) -> RunError:
        return self._damaged(name, f"{type(error).__name__}: {error}")

    def _read_json(self, name: str, *, renamed: bool = True) -> dict[str, Any]:
        try:
            found = read_json(self.path / name, self.present if renamed else str)
        except (OSError, ValueError) as error:
            raise self._damaged(name, str(error)) from None
        if not isinstance(found, dict):
            raise self._damaged(name, f"{type(found).__name__} in place of a table")
        return found

    def _damaged(self, name: str, got: str) -> RunError:
        return RunError(
            f"{self.path / name} cannot be read",
            expected="a file as fedrec wrote it",
            got=got,
            fix=(
                "restore it from a backup; a run that was not finished is resumed from its"
                " checkpoints"
            ),
        )


@dataclass(frozen=True)
class _Written:
    """The rows of a table that were written, and their text: a run writes its rounds after each
    one, and formatting all of them each time would take time that grows with the square of their
    number. A value has the same text in every row, whatever else its column has."""

    rows: list[Row]
    columns: dict[str, None]
    text: str

    @classmethod
    def of(cls, rows: list[Row], earlier: _Written | None) -> _Written:
        """A table of these rows. Only those are formatted that an earlier table lacks, if it has
        the first ones and all columns."""
        count = 0 if earlier is None else len(earlier.rows)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if (
            earlier is not None
            and count <= len(rows)
            and rows[count - 1] is earlier.rows[-1]
            and all(row.keys() <= earlier.columns.keys() for row in rows[count:])
        ):
            columns = earlier.columns
            text.write(earlier.text)
        else:
            columns = dict.fromkeys(name for row in rows for name in row)
            count = 0
            writer.writerow(columns)
        for row in rows[count:]:
            cells = map(row.get, columns)
            writer.writerow(None if cell != cell else cell for cell in cells)  # NaN
        return cls(rows, columns, text.getvalue())


def _never_began(folder: Path) -> bool:
    """Whether a folder is empty, or of a run that was killed before it wrote run.json."""
    names = sorted(file.name.lstrip(".") for file in folder.iterdir())
    started = not names or names[0].startswith(_BEFORE_RUN[0])
    return started and all(name.startswith(_BEFORE_RUN) for name in names)


def _are_metrics(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _numbers(metrics: Mapping[str, float | str | None]) -> dict[str, float]:
    """Metrics as they were before they were written as JSON."""
    return {name: number(value) for name, value in metrics.items()}


def _json(value: Any) -> str:
    return json.dumps(finite(value), indent=2, allow_nan=False, default=float) + "\n"
