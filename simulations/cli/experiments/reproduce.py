# SPDX-License-Identifier: Apache-2.0
"""`fedrec reproduce`: compare a paper's tables and figures with our results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import pandas as pd

    from simulations.reproduce.study import Study

_FILE_WIDTH = 120  # width in characters of a table in a file or a pipe


def reproduce(
    paper: Annotated[
        str | None, typer.Argument(help="Paper: privrec, dp-vae, targeted-dp, pnbm or upc-sdg.")
    ] = None,
    item: Annotated[
        str | None,
        typer.Argument(help="Table or figure, such as table2; default: all of the paper."),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option("--list", help="List all tables and figures with their expected duration."),
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
        typer.Option(help="Only run the task of this name; --list PAPER TABLE prints the names."),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the study: new, or of the same study."),
    ] = None,
) -> None:
    """Run the experiments of a paper's table or figure, and print its numbers beside ours, with
    intervals. The expected duration is printed first. The same command continues an interrupted
    study.
    """
    from fedrec.errors import ExperimentError
    from simulations.reproduce.catalogue import find, studies

    if listed or paper is None:
        found = find(paper, item) if paper else list(studies())
        _print_list(found)
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
    for study in find(paper, item):
        _reproduce(study, quick, seeds, only, output if item else None)


def _reproduce(
    study: Study, quick: bool, seeds: int | None, only: str, output: Path | None
) -> None:
    from fedrec.report.privacy_total import shown_together
    from fedrec.runs.directory import runs_directory
    from fedrec.runtime.atomic_files import write_atomically
    from simulations.reproduce import execution
    from simulations.reproduce.published import published
    from simulations.reproduce.tables import comparison, markdown

    default = (
        runs_directory() / "reproduce" / f"{study.paper}-{study.item}{'-quick' if quick else ''}"
    )
    folder = execution.StudyFolder(output or default, study, quick=quick)
    count = seeds or (1 if quick else study.seeds)
    try:
        done = execution.reproduce(
            folder, count, only=only, say=lambda text: typer.echo(text, err=True)
        )
    except KeyboardInterrupt:
        typer.secho("\ninterrupted; the same command continues", err=True)
        raise typer.Exit(130) from None
    table = comparison(
        published(study.paper, study.item, study.published),
        [one for _, found in done for one in found],
    )
    seconds = sum(folder.seconds(job) for job, _ in done)
    notes = [
        *study.differs,
        f"Our numbers took {execution.duration(seconds)}, {count} seed{'s' if count > 1 else ''}.",
        "95 % intervals: over seeds (Student's t) where there are several, else over users.",
    ]
    notes += shown_together(run.parent for run in sorted(folder.path.rglob("run.json")))
    if quick:
        notes.insert(
            0,
            "QUICK: what is simulated ran on synthetic data for two rounds, so those numbers are "
            "meaningless; this only shows that everything runs.",
        )
    write_atomically(folder.path / f"{study.item}.csv", table.to_csv(index=False))
    write_atomically(
        folder.path / f"{study.item}.md", markdown(table, f"{study.name}: {study.title}", notes)
    )
    _print(study, table, notes)
    typer.echo(folder.path)


def _print(study: Study, table: pd.DataFrame, notes: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from simulations.reproduce.tables import cells_of

    several = len(set(table["dataset"])) > 1
    named = ("dataset", "model", "metric") if several else ("model", "metric")
    shown = Table(*named, title=f"{study.name}: {study.title}", title_justify="left")
    for column in ("published", "ours", "95 % interval"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in table.to_dict("records"):
        shown.add_row(*cells_of(row)[0 if several else 1 :])
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(shown)
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _print_list(studies: list[Study]) -> None:
    from simulations.reproduce.catalogue import NOT_HERE
    from simulations.reproduce.execution import duration

    for study in studies:
        time = duration(study.seconds(study.seeds))
        seeds = f"{study.seeds} seed{'s' if study.seeds > 1 else ''}"
        typer.echo(f"{study.paper:12} {study.item:15} {time:>7}, {seeds:8} {study.title}")
    for name, why in NOT_HERE.items():
        if name.partition(" ")[0] in {study.paper for study in studies}:
            paper, item = name.split()
            typer.echo(f"{paper:12} {item:15} not here: {why}")
