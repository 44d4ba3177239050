# SPDX-License-Identifier: Apache-2.0
"""Shared by all commands that run experiments: progress, interruptions, results and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from fedrec.experiment.schema import Experiment
    from fedrec.runs.result import Result
    from simulations.studies.declaration import Study, TaskJob


_REST = "What this covers, and what it does not, is in the report."


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
    from fedrec.runs.ids import default_folder
    from simulations import runner
    from simulations.amend import discard

    folder = output or default_folder(experiment)
    if (folder / "run.json").is_file() and go_on:
        _refuse_another(folder, experiment)
        return watched(folder, quiet, lambda callbacks: runner.resume(folder, callbacks=callbacks))
    if (folder / "run.json").is_file() and overwrite:
        discard(folder)
    return watched(
        folder, quiet, lambda callbacks: runner.run(experiment, output=folder, callbacks=callbacks)
    )


def _refuse_another(folder: Path, experiment: Experiment) -> None:
    from fedrec.errors import RunError
    from fedrec.runs.folder import RunFolder
    from simulations import runner

    known = RunFolder(folder).experiment
    experiment = runner.settle(runner.with_private_popularity(experiment), known.engine)
    if known.digest() != experiment.digest():
        before = known.table()
        asked = experiment.table()
        other = sorted(
            key for key in before.keys() | asked.keys() if before.get(key) != asked.get(key)
        )
        raise RunError(
            f"there is another run in {folder}",
            expected="the same experiment and settings with --resume",
            got=f"{', '.join(other)} differ from its experiment.toml",
            fix=(
                f"fedrec resume {quote(str(folder))} --set KEY=VALUE, --overwrite, or another"
                " --output"
            ),
        )


def watched(folder: Path, quiet: bool, work: Callable[[list], Result]) -> Result:
    """Run the work and print the results; after Ctrl-C, print the command that resumes the run."""
    from server.callbacks.progress import Progress

    progress = Progress()
    with interruptible(f"continue with: fedrec resume {quote(str(folder))}"):
        try:
            result = work([] if quiet else [progress])
        finally:
            progress.close()
    if not quiet:
        print_table(result)
        _print_next(result)
        typer.echo("Run folder:", err=True)
    typer.echo(result.folder)
    return result


@contextmanager
def interruptible(how: str) -> Iterator[None]:
    """Work on experiments: after Ctrl-C, print how the work is continued, and end with status
    130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.secho(f"\ninterrupted; {how}", err=True)
        raise typer.Exit(130) from None


def run_tasks(
    study: Study,
    said: str,
    path: Path,
    seeds: int,
    workers: int,
    only: str = "",
    quick: bool = False,
) -> tuple[Path, list[TaskJob], dict[str, str]]:
    """Run the tasks of a study, or some of them.

    Args:
        study: the study.
        said: what it is called while it runs.
        path: its folder.
        seeds: number of seeds.
        workers: number of tasks at a time.
        only: name or pattern of the tasks; empty: all.
        quick: whether to run the small version.

    Returns:
        The folder, the jobs, and the errors of those that failed.
    """
    from simulations.studies.runs import folder_of, run_study, selected

    folder = folder_of(study, path, quick=quick)
    jobs = selected(study.jobs(folder.path, seeds, quick=quick), only)

    def say(text: str) -> None:
        typer.echo(f"{said}: {text}", err=True)

    with interruptible("the same command continues"):
        failures = run_study(folder, jobs, workers=workers, quiet=False, say=say)
    return folder.path, jobs, failures


def end_with(failures: Mapping[str, str]) -> None:
    """Print errors by what they are of; the exit status is 1 if there are any."""
    for name, text in failures.items():
        typer.secho(f"{name} failed: {text}", err=True)
    if failures:
        raise typer.Exit(1)


def refuse_other_page(output: Path | None) -> None:
    """Refuse a page that is no HTML file.

    Raises:
        ExperimentError: it is none.
    """
    from fedrec.errors import ExperimentError

    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise ExperimentError(
            "a report is an HTML page",
            expected="a file that ends in .html",
            got=str(output),
            fix=f"-o {output.with_suffix('.html')}, and print it to PDF from a browser",
        )


def wide_console(width: int) -> Console:
    """Where tables are printed; a file or a pipe has so many columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)


def print_table(result: Result) -> None:
    """Print the results of a finished run, and its privacy cost."""
    from rich.console import Console

    from fedrec.report.summary import (
        early_stopping_line,
        input_lines,
        private_lines,
        significance_line,
        summary_notes,
        summary_table,
    )

    console = Console()
    console.print(summary_table(result))
    users = len(result.users)
    counts = f"{users} user{'' if users == 1 else 's'}"
    if result.experiment.federated:
        counts += f", {result.rounds_in_words}"
    if result.experiment.privacy is not None:
        lines = private_lines(result)
        counts += f". {_REST}"
    else:
        lines = [*input_lines(result), significance_line(result), early_stopping_line(result)]
        lines += [*summary_notes(result), *_privacy(result)]
        counts += "."
    for line in filter(None, [*lines, counts]):
        # a line of a private run stays one, so that few are read
        console.print(line, highlight=False, soft_wrap=result.experiment.privacy is not None)


def _privacy(result: Result) -> list[str]:
    """What is guaranteed without `[privacy]`, as by private baselines; of a run on an own table,
    the first sentence and the total alone."""
    from fedrec.report.summary import total_lines

    if result.experiment.dataset.name != "table" or not result.privacy:
        return list(result.privacy)
    total = [line for line in total_lines(result) if line != result.privacy[0]]
    return [result.privacy[0], *total, _REST]


def _print_next(result: Result) -> None:
    """Suggested next commands after a finished run, on standard error."""
    lines = [
        f"fedrec report {quote(str(result.folder))} -o report.html",
        f"fedrec compare {quote(str(result.folder))} OTHER-RUN",
        f"fedrec sweep {quote(str(result.folder / 'experiment.toml'))} --seeds 3",
    ]
    if result.experiment.federated and result.experiment.dataset.name == "table":
        lines.insert(1, f"fedrec recommend {quote(str(result.folder))} --top 20 -o lists.csv")
    watch = result.experiment.early_stopping
    if watch is not None and result.early_stopping.get("stopped"):
        patience = 2 * watch.patience
        lines.append(
            f"fedrec resume {quote(str(result.folder))} --set early-stopping.patience={patience}"
        )
    elif _can_learn_more(result.experiment):
        rounds = 2 * result.experiment.rounds
        lines.append(f"fedrec resume {quote(str(result.folder))} --set rounds={rounds}")
    for line in ("Next:", *(f"  {line}" for line in lines)):
        typer.echo(line, err=True)


def _can_learn_more(experiment: Experiment) -> bool:
    """Whether another round may follow and change the parameters; not if the noise was calibrated
    to all rounds, or if clients send statistics of their histories, which are the same in each
    round."""
    from clients.steps.statistics import SufficientStatistics
    from fedrec.components.registry import STEP, resolve

    if experiment.privacy is not None and experiment.privacy.epsilon is not None:
        return False
    return experiment.federated and not issubclass(
        resolve(STEP, experiment.step.name), SufficientStatistics
    )
