# SPDX-License-Identifier: Apache-2.0
"""Interface of callbacks, the callbacks of a run, its progress on standard error, and trackers:
MLflow and TensorBoard.

The callbacks of a run: those that its experiment names, and those that its caller brings.

A callback may observe and end the run, but not change its results: it gets read-only parameters,
and an error in it names the callback. A tracker that fails does not end the run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from flwr.serverapp.strategy import Strategy
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from fedrec.components.registry import CALLBACK
from fedrec.components.sections import component_errors, component_of
from fedrec.config import Config
from fedrec.errors import ExperimentError, FedrecError
from fedrec.experiment.schema import Experiment, marked
from fedrec.runs.folder import Result, RunFolder
from fedrec.runs.ids import runs_directory
from fedrec.runtime.files import read_json, write_atomically
from fedrec.runtime.ragged import flat

if TYPE_CHECKING:
    from mlflow import MlflowClient

# The interface of callbacks, which are called on events of a run and may end it.


@dataclass(frozen=True)
class RunEvent:
    """Event of a run other than a round.

    Attributes:
        text: a line for the user: the next step, or the reason why the run ends early.
        system: the centralised system that is fitted next and then evaluated.
        done: number of users evaluated, by a centralised system or in the final evaluation.
        total: number of users to evaluate; 0: no evaluation.
    """

    text: str = ""
    system: str = ""
    done: int = 0
    total: int = 0


class Callback:
    """Observes a run. All methods do nothing by default.

    A built-in has a `name` and lives in `server/callbacks.py`, its configuration class above it.
    An experiment names it in `callbacks = [{ name = "...", ... }]`; from Python, instances can be
    passed to `fedrec.run`. The state of a callback is not saved: a resumed run has a new instance.

    Args:
        config: its settings, if it has any.
    """

    Config: ClassVar[type[Config]] = Config

    def __init__(self, config: Config | None = None) -> None:
        self.config = config

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """Called at the start, before round `first_round` (above 1 when resumed) of `rounds`."""

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """Called after a round is saved; `row` is its line in rounds.csv, and `seconds` its
        duration, NaN in privacy mode `secure`. Return True to end the run here."""
        return False

    def on_event(self, event: RunEvent) -> None:
        """Called when something other than a round begins, and after users are evaluated."""

    def on_end(self, result: Result) -> None:
        """Called at the end of the run."""


class Observer(Callback):
    """Callback that observes the strategy's updates, such as an audit."""

    def observe(self, strategy: Strategy) -> None:
        """Called at the start of the run; methods of the strategy may be wrapped."""


class Tracker(Callback):
    """Callback that only reports metrics to another program: if it fails, the run continues without
    it. The failure of another callback ends the run."""

    def log(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        """Report the metrics of a round (empty prefix) or of a system."""

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """Called after a round is saved; `row` is its line in rounds.csv. Never ends the run."""
        self.log("", _numbers({**row, "seconds": seconds}), int(row["round"]))
        return False

    def on_end(self, result: Result) -> None:
        """Called at the end of the run."""
        systems = {"final": result.metrics, "before fine-tuning": result.before_fine_tuning}
        systems |= {f"baseline/{name}": metrics for name, metrics in result.baselines.items()}
        for system, metrics in systems.items():
            self.log(f"{system}/", _numbers(metrics), len(result.rounds))


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Finite numbers of a row, without the round number."""
    values = {n: float(v) for n, v in row.items() if isinstance(v, int | float) and n != "round"}
    return {name: value for name, value in values.items() if math.isfinite(value)}


log = logging.getLogger("fedrec")
_LONGEST = 300  # characters of a reason


class CallbackList:
    """All callbacks of a run, called in order: those that its experiment names, then others.

    Args:
        experiment: the experiment.
        others: further callbacks.

    Raises:
        ComponentError: one cannot be made.
    """

    def __init__(self, experiment: Experiment, others: Sequence[Callback] = ()) -> None:
        named = [component_of(CALLBACK, section) for section in experiment.callbacks or ()]
        self.callbacks: list[Callback] = [*named, *others]
        self._failed: list[Callback] = []  # trackers that failed and are no longer called
        self.ended_by: list[str] = []  # classes of those that end the run after the last round

    def observe(self, strategy: Strategy) -> None:
        """Call `observe` of all observers."""
        for callback in self.callbacks:
            if isinstance(callback, Observer):
                self._call(callback, "observe", strategy)

    def tell(self, hook: str, *arguments: Any) -> None:
        """Call a method of all callbacks, such as `on_start`."""
        for callback in self.callbacks:
            self._call(callback, hook, *arguments)

    def event(self, text: str, system: str = "") -> None:
        """Report an event, see `RunEvent`."""
        self.tell("on_event", RunEvent(text, system))

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """Called after a round is saved; `row` is its line in rounds.csv. Returns True if the run
        ends here. Each callback gets its own copy of the row."""
        self.ended_by = [
            type(callback).__name__
            for callback in self.callbacks
            if self._call(callback, "after_round", dict(row), seconds)
        ]
        return bool(self.ended_by)

    def evaluated(self, done: int, total: int) -> None:
        """Report that `done` of `total` users of a centralised system or of the final evaluation
        are evaluated."""
        self.tell("on_event", RunEvent(done=done, total=total))

    def _call(self, callback: Callback, hook: str, *arguments: Any) -> Any:
        if any(callback is failed for failed in self._failed):
            return None
        try:
            with component_errors(CALLBACK.name, callback, f"in {hook}"):
                return getattr(callback, hook)(*arguments)
        except FedrecError as error:
            if not isinstance(callback, Tracker):
                raise
            self._failed.append(callback)
            reason = " ".join(str(error.got or error.problem).split())[:_LONGEST]
            name = type(callback).__name__
            log.warning("%s failed, and the run continues without it: %s", name, reason)
            return None


# Progress of a run: a live line on a terminal (round, loss, Hits@10, times), else plain lines.

_SECONDS_BETWEEN_LINES = 5.0
_ROUNDS_BETWEEN_LINES = 10


class Progress(Callback):
    """Shows the progress of a run on standard error."""

    name = "progress"

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._console = Console(stderr=True)
        self._bars: RichProgress | None = None
        self._started = self._spoke = time.monotonic()
        self._task: Any = None
        self._rounds = 0
        self._first = 1
        self._timed = True

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """Called at the start, before round `first_round` (above 1 when resumed) of `rounds`."""
        self._rounds = rounds
        self._first = first_round
        self._timed = not run.experiment.hides_cohorts  # secret cohorts, which times reveal
        self._started = time.monotonic()
        left = f"rounds {first_round} to {rounds}" if first_round <= rounds else "no rounds left"
        self._say(f"{run.experiment.name}: {left}, folder {run.path}")
        self._show("training", rounds, first_round - 1)

    def on_event(self, event: RunEvent) -> None:
        """Called when something other than a round begins, and after users are evaluated."""
        if event.text:
            self._say(event.text)
        if event.system:
            self._show(event.system, None, 0)
        if event.total:
            self._evaluated(event.done, event.total)

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """Called after a round is saved; `row` is its line in rounds.csv. Never ends the run."""
        number = int(row["round"])
        if self._bars is not None:
            self._bars.update(self._task, completed=number, figures=_figures(row))
        elif self._has_own_line(number):
            elapsed = time.monotonic() - self._started
            left = elapsed / (number - self._first + 1) * (self._rounds - number)
            times = f"  elapsed {elapsed:.0f} s, left {left:.0f} s" if self._timed else ""
            self._say(f"round {number}/{self._rounds}  {_figures(row)}{times}")
        return False

    def _evaluated(self, done: int, total: int) -> None:
        if self._bars is None:
            if done == total or time.monotonic() > self._spoke + _SECONDS_BETWEEN_LINES:
                self._say(f"evaluated {done}/{total} users")
        elif self._bars.tasks[-1].total is None:  # after fitting a baseline, of unknown duration
            self._bars.update(self._task, total=total, completed=done)
        elif self._bars.tasks[-1].total != total or self._bars.tasks[-1].finished:
            self._show("evaluation", total, done)
        else:
            self._bars.update(self._task, completed=done)

    def on_end(self, result: Result) -> None:
        """Called at the end of the run."""
        self.close()

    def close(self) -> None:
        """Restore the terminal; safe to call twice."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _has_own_line(self, number: int) -> bool:
        """True if a round gets its own line without a terminal: one in ten, the first and the
        last."""
        return number in (self._first, self._rounds) or number % _ROUNDS_BETWEEN_LINES == 0

    def _show(self, label: str, total: int | None, completed: int) -> None:
        if not self._console.is_terminal:
            return
        if self._bars is None:
            columns = [
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
            ]
            if self._timed:
                columns += [TimeElapsedColumn(), TimeRemainingColumn(elapsed_when_finished=True)]
            self._bars = RichProgress(*columns, console=self._console)
            self._bars.start()
        self._task = self._bars.add_task(label, total=total, completed=completed, figures="")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
        self._spoke = time.monotonic()


def _figures(row: dict[str, Any]) -> str:
    """Loss and first metric of a round, as a short text."""
    watched = [name for name in row if name.startswith("validation-")]
    wanted = ["loss", "hits@10", *(name for name in row if name.startswith(("hits@", "rmse")))]
    shown = [
        name for name in dict.fromkeys(wanted) if math.isfinite(float(row.get(name, math.nan)))
    ]
    return "  ".join(f"{name} {float(row[name]):.4f}" for name in [*shown[:2], *watched])


# Rounds as TensorBoard scalars (extra `track`): `callbacks = [{ name = "tensorboard" }]`.
#
# A resumed run continues in the same folder; events of rounds after its checkpoint are dropped.


class TensorBoardConfig(Config):
    """Settings of the TensorBoard callback."""

    folder: Path | None = None
    """Folder of the event files, with one subfolder per run; default: `tensorboard` in the run
    folder."""


class TensorBoard(Tracker):
    """Writes the metrics of each round and the final ones for TensorBoard.

    Raises:
        ExperimentError: TensorBoard is not installed.
    """

    name = "tensorboard"
    Config = TensorBoardConfig
    config: TensorBoardConfig

    def __init__(self, config: TensorBoardConfig | None = None) -> None:
        super().__init__(config or TensorBoardConfig())
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._make = SummaryWriter
        self._writer = None

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """Called at the start, before round `first_round` (above 1 when resumed) of `rounds`."""
        chosen = self.config.folder
        folder = run.path / "tensorboard" if chosen is None else chosen.expanduser() / run.path.name
        self._writer = self._make(str(folder), purge_step=first_round)

    def log(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{prefix or 'round/'}{name}", value, step)

    def on_end(self, result: Result) -> None:
        """Called at the end of the run."""
        super().on_end(result)
        if self._writer is not None:
            self._writer.close()


def _missing(package: str) -> ExperimentError:
    """Error if a package of the extra `track` is not installed."""
    return ExperimentError(
        f"callback {package!r} needs a package that is not installed",
        fix="pip install 'fedrec[track]', or leave the callback out",
    )


# Runs in MLflow (extra `track`): `callbacks = [{ name = "mlflow" }]`.
#
# Settings become parameters, rounds metrics, final figures metrics with the prefix `final/`. A
# resumed run continues the same MLflow run, whose id is stored in `mlflow.json`. MLflow allows no
# `@` in names: `hits@10` is `hits-at-10`. Its own usage statistics are switched off unless the user
# has switched them on. If a server twice does not reply within 5 s (`$MLFLOW_HTTP_REQUEST_TIMEOUT`
# and `$MLFLOW_HTTP_REQUEST_MAX_RETRIES` change this), or a database cannot be opened at once, the
# run continues without MLflow.

_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
_LONGEST_VALUE = 500  # characters of a parameter
_AT_ONCE = 100  # parameters in a request


class MlflowConfig(Config):
    """Settings of the MLflow callback."""

    tracking_uri: str | None = None
    """URI of the MLflow server or database; default: `$MLFLOW_TRACKING_URI`, or `mlflow.db` in the
    directory of runs."""
    experiment: str | None = None
    """Name of the MLflow experiment; default: the name of the fedrec experiment."""


class Mlflow(Tracker):
    """Logs a run to MLflow.

    Raises:
        ExperimentError: MLflow is not installed.
    """

    name = "mlflow"
    Config = MlflowConfig
    config: MlflowConfig

    def __init__(self, config: MlflowConfig | None = None) -> None:
        super().__init__(config or MlflowConfig())
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise _missing("mlflow") from None
        self._connect = MlflowClient
        self._run = ""

    def _uri(self) -> str:
        chosen = self.config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if chosen:
            return chosen
        folder = runs_directory().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{folder / 'mlflow.db'}"

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """Called at the start, before round `first_round` (above 1 when resumed) of `rounds`."""
        from mlflow.entities import Param, RunTag

        uri = self._uri()
        if "sql" in urlsplit(uri).scheme:
            from mlflow.store.db import utils

            utils.MAX_RETRY_COUNT = 1  # by default MLflow tries for two minutes to open a database
        self._client: MlflowClient = self._connect(tracking_uri=uri)
        file = run.path / "mlflow.json"
        if file.is_file():
            self._run = read_json(file)["run"]
            self._client.update_run(self._run, status="RUNNING")
            return
        name = self.config.experiment or marked(run.experiment)
        before = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if before is None else before.experiment_id
        self._run = self._client.create_run(number, run_name=run.path.name).info.run_id
        write_atomically(file, json.dumps({"run": self._run}) + "\n")
        params = [
            Param(key, str(value)[:_LONGEST_VALUE]) for key, value in flat(run.experiment.table())
        ]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + _AT_ONCE])
        self._client.log_batch(self._run, tags=[RunTag("fedrec.folder", str(run.path))])

    def log(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        """Log metrics; none of centralised systems alone, which have no run."""
        from mlflow.entities import Metric

        if self._run:
            now = int(time.time() * 1000)
            metrics = [
                Metric(f"{prefix}{name}".replace("@", "-at-"), value, now, step)
                for name, value in values.items()
            ]
            self._client.log_batch(self._run, metrics=metrics)

    def on_end(self, result: Result) -> None:
        """Called at the end of the run."""
        super().on_end(result)
        if self._run:
            self._client.set_terminated(self._run)
