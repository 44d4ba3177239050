# SPDX-License-Identifier: Apache-2.0
"""`fedrec reproduce`: compare a paper's tables and figures with our results."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulations.cli import options
from simulations.cli.finishing import end_with, run_tasks, wide_console

if TYPE_CHECKING:
    from simulations.studies.declaration import Study
    from simulations.studies.tables import Tables


_FILE_WIDTH = 120  # width in characters of a table in a file or a pipe


def reproduce(
    paper: Annotated[
        str | None,
        typer.Argument(
            help=(
                "Paper: privrec, dp-vae, targeted-dp, pnbm or upc-sdg; or adversaries; or a TOML"
                " file of studies."
            )
        ),
    ] = None,
    item: Annotated[
        str | None,
        typer.Argument(help="Table or figure, such as table2; default: all of the paper."),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--list",
            help="List all tables and figures: what they show, our numbers, command and expected "
            "duration, or why they are not here.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option(help="Test that it runs, with few rounds on synthetic data.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Number of seeds; default: that of the study, usually 1."),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            help="Only run the tasks of this name or pattern, such as 'mf-*'; --list PAPER TABLE "
            "prints the names."
        ),
    ] = "",
    workers: Annotated[int, options.workers("tasks")] = 1,
    output: Annotated[
        Path | None, options.output("Folder of the study: new, or of the same study.")
    ] = None,
) -> None:
    """Run the experiments of a paper's table or figure, and print its numbers beside ours, with
    intervals. The expected duration is printed first. The same command continues an interrupted
    study. Studies of your own are declared in a TOML file in the same way.
    """
    from fedrec.errors import ExperimentError
    from simulations.reproduce.recorded import find, studies

    if listed or paper is None:
        found = find(paper, item) if paper else list(studies())
        _print_list(found, paper if paper and paper.endswith(".toml") else None)
        if item is not None:
            typer.echo(f"tasks: {', '.join(task.name for one in found for task in one.tasks)}")
        return
    if only and item is None:
        raise ExperimentError(
            "--only names a task of one table or figure",
            expected=f"fedrec reproduce {paper} TABLE --only NAME",
            got="no table or figure",
            fix=f"fedrec reproduce --list {paper} lists them",
        )
    failures: dict[str, str] = {}
    for study in find(paper, item):
        failures |= _reproduce(study, quick, seeds, only, workers, output if item else None)
    end_with(failures)


def _reproduce(
    study: Study, quick: bool, seeds: int | None, only: str, workers: int, output: Path | None
) -> dict[str, str]:
    """Run and print a study; returns the errors of tasks that failed."""
    from fedrec.runs.ids import runs_directory
    from simulations.reproduce.recorded import published
    from simulations.studies import tables

    default = (
        runs_directory() / "reproduce" / f"{study.paper}-{study.item}{'-quick' if quick else ''}"
    )
    count = seeds or (1 if quick else study.seeds)
    folder, jobs, failures = run_tasks(
        study, study.name, output or default, count, workers, only, quick
    )
    known = published(study.paper, study.item, study.published)
    _print(study, tables.write(study, folder, jobs, known, quick=quick))
    typer.echo(folder)
    return failures


def _print(study: Study, found: Tables) -> None:
    from rich.table import Table

    from simulations.studies.tables import cells_of

    table = found.comparison
    several = len(set(table["dataset"])) > 1
    named = ("dataset", "model", "metric") if several else ("model", "metric")
    shown = Table(*named, title=f"{study.name}: {study.title}", title_justify="left")
    for column in ("published", "ours", "95 % interval"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in table.to_dict("records"):
        shown.add_row(*cells_of(row)[0 if several else 1 :])
    console = wide_console(_FILE_WIDTH)
    console.print(shown)
    for note in [*found.compared, *found.notes]:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _print_list(studies: list[Study], file: str | None) -> None:
    """Print what each table and figure shows, one of our numbers, and how to make it; of a file of
    other studies no numbers are known."""
    from simulations.reproduce.recorded import NOT_HERE, UNRECORDED, command, key, recorded
    from simulations.studies.tables import duration

    numbers = recorded() if file is None else {}
    seconds: dict[str, float] = defaultdict(float)
    for study in studies:
        typer.echo(f"{study.paper:12} {study.item:15} {study.title}")
        found = numbers.get(key(study))
        seeds = study.seeds
        if found is not None:
            typer.echo(f"{'':28} {found.headline} ({found.date}, fedrec {found.fedrec})")
            seeds = found.seeds
        elif file is None:
            why = UNRECORDED.get(study.name, "not measured with this version")
            typer.echo(f"{'':28} no numbers: {why}")
        seconds[study.paper] += study.seconds(study.seeds)
        words = command(study, seeds) if file is None else f"fedrec reproduce {file} {study.item}"
        counted = f"{seeds} seed{'s' if seeds > 1 else ''}"
        typer.echo(f"{'':28} {words} ({counted}, about {duration(study.seconds(seeds))})")
    for name, why in NOT_HERE.items():
        if name.partition(" ")[0] in seconds and file is None:
            paper, item = name.split()
            typer.echo(f"{paper:12} {item:15} not here: {why}")
    for paper, total in seconds.items():
        words = f"fedrec reproduce {file or paper}"
        typer.echo(f"{words} makes all of these, in about {duration(total)} on two cores")
