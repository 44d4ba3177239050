# SPDX-License-Identifier: Apache-2.0
"""Progress, interruptions, results and errors of all commands that run experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from shlex import quote

import typer
from rich.console import Console

from clients.steps.statistics import SufficientStatistics
from fedrec.components.registry import STEP, resolve
from fedrec.experiment.schema import Experiment
from fedrec.report.summary import result_lines, summary_table
from fedrec.runs.folder import Result
from fedrec.runs.ids import default_folder
from server.callbacks.base import Progress
from simulations import runner
from simulations.studies.runs import run_once


def finish(
    experiment: Experiment,
    output: Path | None,
    quiet: bool,
    *,
    go_on: bool = False,
    overwrite: bool = False,
) -> Result:
    """Run an experiment and print its results.

    Args:
        experiment: the resolved experiment.
        output: the run folder; None for a new one below `runs`.
        quiet: print only the run folder.
        go_on: continue the run in `output` if there is one.
        overwrite: remove the run in `output` if there is one.

    Raises:
        RunError: `go_on` is set, and `output` has a run of another experiment.
    """
    folder = output or default_folder(experiment)
    if (folder / "run.json").is_file() and go_on:
        work = partial(run_once, experiment, folder)
        return watched(folder, quiet, lambda callbacks: work(callbacks).read_result())
    if (folder / "run.json").is_file() and overwrite:
        runner.discard(folder)
    return watched(
        folder, quiet, lambda callbacks: runner.run(experiment, output=folder, callbacks=callbacks)
    )


def watched(folder: Path, quiet: bool, work: Callable[[list], Result]) -> Result:
    """Run the work and print the results; after Ctrl-C, print the command that resumes the run."""
    resume = f"continue with: fedrec resume {quote(str(folder))}"
    with interruptible(resume), closing(Progress()) as progress:
        result = work([] if quiet else [progress])
    if not quiet:
        print_table(result)
        _print_next(result)
        typer.echo("Run folder:", err=True)
    typer.echo(result.folder)
    return result


@contextmanager
def interruptible(how: str) -> Iterator[None]:
    """On Ctrl-C, print how to continue the work, and exit with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.secho(f"\ninterrupted; {how}", err=True)
        raise typer.Exit(130) from None


def wide_console(width: int) -> Console:
    """Console for tables, `width` columns wide in a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def print_table(result: Result) -> None:
    """Print the results of a finished run, and its privacy cost."""
    console = Console()
    console.print(summary_table(result))
    for line in result_lines(result):
        # without wrapping, so that a private run has few lines
        console.print(line, highlight=False, soft_wrap=result.experiment.privacy is not None)


def _print_next(result: Result) -> None:
    """Print suggested next commands after a finished run to standard error."""
    experiment = result.experiment
    run = quote(str(result.folder))
    lines = [
        f"fedrec report {run} -o report.html",
        f"fedrec compare {run} OTHER-RUN",
        f"fedrec sweep {quote(str(result.folder / 'experiment.toml'))} --seeds 3",
    ]
    if experiment.federated and experiment.dataset.name == "table":
        lines.insert(1, f"fedrec recommend {run} --top 20 -o lists.csv")
    watch = experiment.early_stopping
    calibrated = experiment.privacy is not None and experiment.privacy.epsilon is not None
    if watch is not None and result.early_stopping.get("stopped"):
        lines.append(f"fedrec resume {run} --set early-stopping.patience={2 * watch.patience}")
    elif experiment.federated and not calibrated:  # noise is calibrated to all rounds
        step = resolve(STEP, experiment.step.name)
        if not issubclass(step, SufficientStatistics):  # which are the same in each round
            lines.append(f"fedrec resume {run} --set rounds={2 * experiment.rounds}")
    for line in ("Next:", *(f"  {line}" for line in lines)):
        typer.echo(line, err=True)
