# SPDX-License-Identifier: Apache-2.0
"""Interface of callbacks, the callbacks of a run, and its progress on standard error.

The callbacks of a run: those that its experiment names, and those that its caller brings.

A callback may observe and end the run, but not change its results: it gets read-only parameters,
and an error in it names the callback. A tracker that fails does not end the run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from fedrec.errors import FedrecError
from fedrec.experiment.schema import Experiment
from fedrec.runs.folder import Result, RunFolder

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

    A built-in has a `name` and lives in `server/callbacks/`, its configuration class above it.
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
    """Callback that only reports to another program: if it fails, the run continues without it. The
    failure of another callback ends the run."""


log = logging.getLogger("fedrec")
_LONGEST = 300  # characters of a reason


def callbacks_of(experiment: Experiment) -> list[Callback]:
    """Make the callbacks that an experiment names.

    Raises:
        ComponentError: one cannot be made.
    """
    return [component_of(CALLBACK, section) for section in experiment.callbacks or ()]


class CallbackList:
    """All callbacks of a run, called in order.

    Args:
        callbacks: the callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = tuple(callbacks)
        self._failed: list[Callback] = []  # trackers that failed and are no longer called
        self.ended_by: list[str] = []  # classes of those that end the run after the last round

    def observe(self, strategy: Strategy) -> None:
        """Call `observe` of all observers."""
        for callback in self.callbacks:
            if isinstance(callback, Observer):
                self._call(callback, "observe", strategy)

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """Called at the start, before round `first_round` (above 1 when resumed) of `rounds`."""
        self._call_all("on_start", run, first_round, rounds)

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """Called after a round is saved; `row` is its line in rounds.csv. Returns True if the run
        ends here. Each callback gets its own copy of the row."""
        self.ended_by = [
            type(callback).__name__
            for callback in self.callbacks
            if self._call(callback, "after_round", dict(row), seconds)
        ]
        return bool(self.ended_by)

    def on_event(self, event: RunEvent) -> None:
        """Called when something other than a round begins, and after users are evaluated."""
        self._call_all("on_event", event)

    def evaluated(self, done: int, total: int) -> None:
        """Report that `done` of `total` users of a centralised system or of the final evaluation
        are evaluated."""
        self.on_event(RunEvent(done=done, total=total))

    def on_end(self, result: Result) -> None:
        """Called at the end of the run."""
        self._call_all("on_end", result)

    def _call_all(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            self._call(callback, hook, *arguments)

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
