# SPDX-License-Identifier: Apache-2.0
"""Progress of a study, on standard error: a bar on a terminal, elsewhere a line when a job begins
and ends, and now and then between."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from simulations.study.job import Job

_EVERY = 30.0  # seconds between lines about rounds


class StudyProgress:
    """Share of completed and running jobs.

    Args:
        total: number of jobs.
        done: jobs that were done before.
        word: what a job is called.
        quiet: whether to print nothing.
    """

    def __init__(self, total: int, done: int, *, word: str = "run", quiet: bool = False) -> None:
        self._word = word
        self._console = Console(stderr=True, quiet=quiet)
        self._total = total
        self._before = done
        self._done = done
        self._running: dict[str, float] = {}
        self._started = self._said = time.monotonic()
        self._bar: RichProgress | None = None
        if self._console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
            )
            self._bar = RichProgress(*columns, TimeRemainingColumn(), console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(f"{done}/{total} {word}s", total=total, completed=done)
        else:
            self.say(f"{done}/{total} {word}s are done")

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._said = time.monotonic()

    def on_rounds(self, job: Job, rounds: int, of: int) -> None:
        """Called with the number of completed rounds of a run."""
        begins = job.name not in self._running
        self._running[job.name] = rounds / of if of else 0.0
        text = f"{self._count}, {job.name} round {rounds}/{of}"
        if self._bar is None and (begins or time.monotonic() - self._said > _EVERY):
            self.say(text)
        self._show(text)

    def on_end(self, job: Job, failure: str | None, words: str) -> None:
        """Called when a run is done."""
        self._done += 1
        self._running.pop(job.name, None)
        elapsed = time.monotonic() - self._started
        left = elapsed / max(1, self._done - self._before) * (self._total - self._done)
        times = "" if self._bar else f"  elapsed {elapsed:.0f} s, left {left:.0f} s"
        ended = words if failure is None else f"failed: {failure.splitlines()[0]}"
        self.say(f"{self._word} {self._done}/{self._total}  {job.name}  {ended}{times}")
        self._show(self._count)

    @property
    def _count(self) -> str:
        return f"{self._done}/{self._total} {self._word}s"

    def close(self) -> None:
        """Restore the terminal; safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, text: str) -> None:
        if self._bar is not None:
            done = self._done + sum(self._running.values())
            self._bar.update(self._task, completed=done, description=text)
