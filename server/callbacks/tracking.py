# SPDX-License-Identifier: Apache-2.0
"""Callbacks that log rounds to MLflow and to TensorBoard.

Runs in MLflow (extra `track`): `callbacks = [{ name = "mlflow" }]`.

Settings become parameters, rounds metrics, final figures metrics with the prefix `final/`. A
resumed run continues the same MLflow run, whose id is stored in `mlflow.json`. MLflow allows no `@`
in names: `hits@10` is `hits-at-10`. Its own usage statistics are switched off unless the user has
switched them on. If a server twice does not reply within 5 s (`$MLFLOW_HTTP_REQUEST_TIMEOUT` and
`$MLFLOW_HTTP_REQUEST_MAX_RETRIES` change this), or a database cannot be opened at once, the run
continues without MLflow.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import marked
from fedrec.runs.folder import Result, RunFolder
from fedrec.runs.ids import runs_directory
from fedrec.runtime.files import read_json, write_atomically
from fedrec.runtime.ragged import flat
from server.callbacks.base import Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient


# Rounds as TensorBoard scalars (extra `track`): `callbacks = [{ name = "tensorboard" }]`.
#
# A resumed run continues in the same folder; events of rounds after its checkpoint are dropped.


class TensorBoardConfig(Config):
    """Settings of the TensorBoard callback."""

    folder: Path | None = None
    """Folder of the event files, with one subfolder per run; default: `tensorboard` in the run
    folder."""


class MetricTracker(Tracker):
    """Tracker of each round's metrics, and of the final metrics of the run."""

    def log(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        """Report the metrics of a round (empty prefix) or of a system."""

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """Called after a round is saved; `row` is its line in rounds.csv. Never ends the run."""
        self.log("", numbers({**row, "seconds": seconds}), int(row["round"]))
        return False

    def on_end(self, result: Result) -> None:
        """Called at the end of the run."""
        systems = {"final": result.metrics, "before fine-tuning": result.before_fine_tuning}
        systems |= {f"baseline/{name}": metrics for name, metrics in result.baselines.items()}
        for system, metrics in systems.items():
            self.log(f"{system}/", numbers(metrics), len(result.rounds))


class TensorBoard(MetricTracker):
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
            raise missing("tensorboard") from None
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


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Finite numbers of a row, without the round number."""
    values = {n: float(v) for n, v in row.items() if isinstance(v, int | float) and n != "round"}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def missing(package: str) -> ExperimentError:
    """Error if a package of the extra `track` is not installed."""
    return ExperimentError(
        f"callback {package!r} needs a package that is not installed",
        fix="pip install 'fedrec[track]', or leave the callback out",
    )


_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
_LONGEST = 500  # characters of a parameter
_AT_ONCE = 100  # parameters in a request


class MlflowConfig(Config):
    """Settings of the MLflow callback."""

    tracking_uri: str | None = None
    """URI of the MLflow server or database; default: `$MLFLOW_TRACKING_URI`, or `mlflow.db` in the
    directory of runs."""
    experiment: str | None = None
    """Name of the MLflow experiment; default: the name of the fedrec experiment."""


class Mlflow(MetricTracker):
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
            raise missing("mlflow") from None
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
        params = [Param(key, str(value)[:_LONGEST]) for key, value in flat(run.experiment.table())]
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
