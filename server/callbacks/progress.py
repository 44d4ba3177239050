# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: a live line on a terminal (round, loss, Hits@10, times), else plain lines."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from fedrec.config import Config
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from server.callbacks.base import Callback, RunEvent

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
