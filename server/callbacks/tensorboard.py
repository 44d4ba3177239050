# SPDX-License-Identifier: Apache-2.0
"""Rounds as TensorBoard scalars (extra `track`): `callbacks = [{ name = "tensorboard" }]`.

A resumed run continues in the same folder; events of rounds after its checkpoint are dropped.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from server.callbacks.base import Callback


class TensorBoardConfig(Config):
    """Settings of the TensorBoard callback."""

    folder: Path | None = None
    """Folder of the event files, with one subfolder per run; default: `tensorboard` in the run
    folder."""


class TensorBoard(Callback):
    """Writes each round's metrics, and those of the whole run at its end, for TensorBoard.

    Raises:
        ExperimentError: TensorBoard is not installed.
    """

    name = "tensorboard"
    Config = TensorBoardConfig
    config: TensorBoardConfig
    tracker = True

    def __init__(self, config: TensorBoardConfig | None = None) -> None:
        super().__init__(config or TensorBoardConfig())
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing("tensorboard") from None
        self._make = SummaryWriter
        self._writer = None

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """The run begins with round `first_round` (more than 1 when resumed) of `rounds`."""
        chosen = self.config.folder
        folder = run.path / "tensorboard" if chosen is None else chosen.expanduser() / run.path.name
        self._writer = self._make(str(folder), purge_step=first_round)

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """A round is complete and saved; `row` is its line in rounds.csv. Return True to end the
        run here. Never ends the run."""
        if self._writer is not None:
            for name, value in numbers({**row, "seconds": seconds}).items():
                self._writer.add_scalar(f"round/{name}", value, int(row["round"]))
        return False

    def on_end(self, result: Result) -> None:
        """The run is finished."""
        if self._writer is None:
            return
        systems = {"final": result.metrics, "before fine-tuning": result.before_fine_tuning}
        systems |= {f"baseline {name}": metrics for name, metrics in result.baselines.items()}
        for system, metrics in systems.items():
            for name, value in numbers(metrics).items():
                self._writer.add_scalar(f"{system}/{name}", value, len(result.rounds))
        self._writer.close()
        self._writer = None


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, without the number of the round."""
    found = {n: float(v) for n, v in row.items() if isinstance(v, int | float) and n != "round"}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def missing(package: str) -> ExperimentError:
    """The error where a package of the extra `track` is not installed."""
    return ExperimentError(
        f"callback {package!r} needs a package that is not installed",
        expected=f"the package {package}",
        got="it cannot be imported",
        fix="pip install 'fedrec[track]', or leave the callback out",
    )
