# SPDX-License-Identifier: Apache-2.0
"""Commands about finished runs: recommend, report, compare and export."""

from pathlib import Path
from typing import Annotated

import typer

from fedrec.report.comparison import compare as compared
from fedrec.report.formats import (
    Format,
    comparison_notes,
    comparison_terminal,
    comparison_text,
    csv_text,
)
from fedrec.report.page.sections import report as rendered
from fedrec.report.privacy_total import shown_together
from fedrec.runs.folder import Result, RunFolder
from fedrec.runtime.files import write_atomically
from simulations.cli import options
from simulations.cli.data import check_output, write_table
from simulations.cli.options import wide_console
from simulations.export.folder import export as write
from simulations.studies.sweep import with_sweeps

# `fedrec recommend`: recommendation lists of a finished run.

NewItems = Annotated[
    Path | None,
    typer.Option(
        help="Items that the run did not have, which alone are ranked: a table of ids and features"
        " or numbers of a vector, or a file of vectors."
    ),
]


def recommend(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    top: Annotated[int, typer.Option(help="Number of items per user.")] = 10,
    users: Annotated[
        list[str] | None, typer.Option("--user", help="User id as in the data; default: all users.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option(help="Table of new rows, whose users get recommendations.")
    ] = None,
    new_items: NewItems = None,
    output: Annotated[
        Path | None, options.output("Output file: .csv or .parquet; default: print as CSV.")
    ] = None,
) -> None:
    """Recommend new items to users with the model of a finished run."""
    if output is not None:
        check_output(output)
    lists = Result.load(folder).recommend(users, k=top, history=history, new_items=new_items)
    served = set(lists["user"].astype(str))
    for user in users or []:
        if user not in served:
            typer.echo(
                f"User {user!r} has rows for all items, so there are no new items to recommend.",
                err=True,
            )
    if output is None:
        typer.echo(csv_text(lists), nl=False)
        return
    write_table(lists, output, csv_text(lists))
    count = f"{len(served):,} user{'' if len(served) == 1 else 's'}"
    typer.echo(f"{len(lists):,} recommendations for {count}: {output}")


# `fedrec report`: a self-contained HTML page about one or more runs.


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, or of sweeps.")],
    output: Annotated[
        Path | None, options.output("Output file; default: report.html in the first folder.")
    ] = None,
) -> None:
    """Write an HTML report: settings, results, users, privacy, cost, and how to repeat the runs."""
    if output is not None:
        options.check_suffix(output, ".html", ".htm")
    results = [RunFolder(run).read_result() for run in with_sweeps(runs)]
    file = output or runs[0] / "report.html"
    write_atomically(file, rendered(results))
    typer.echo(file)


# `fedrec compare`: paired comparison of systems over users.

_FILE_WIDTH = 240  # columns of a table that goes into a file or a pipe
_FORMATS: dict[str, Format] = {".csv": "csv", ".md": "markdown", ".tex": "latex"}


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs on the same data, or of sweeps.")
    ],
    metric: Annotated[
        str | None, typer.Option(help="Metric (column of users.csv); default: hits@10.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Reference system; default: the system of the first run.")
    ] = None,
    output: Annotated[
        Path | None, options.output("Output file: .csv, .md or .tex; default: print a table.")
    ] = None,
) -> None:
    """Compare the systems of one or more runs by paired tests over users (t, Wilcoxon, bootstrap,
    Holm), and over seeds (t) where there are several."""
    if output is not None:
        options.check_suffix(output, *_FORMATS)
    results = [RunFolder(run).read_result() for run in with_sweeps(runs)]
    comparison = compared(results, metric=metric, against=against)
    if output is None:
        console = wide_console(_FILE_WIDTH)
        for table in comparison_terminal(comparison, console.width):
            console.print(table)
        typer.echo("\n".join(comparison_notes(comparison)))
    else:
        write_atomically(output, comparison_text(comparison, _FORMATS[output.suffix.lower()]))
        typer.echo(output)
    for line in shown_together([result.folder for result in results]):
        typer.echo(line, err=output is not None)


# `fedrec export`: the model of a finished run for devices.


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    output: Annotated[Path, options.output("Output folder: new or empty.")],
    user: Annotated[
        str | None, typer.Option(help="Id of the device's user; required for private parameters.")
    ] = None,
    new_items: NewItems = None,
) -> None:
    """Write a finished run's model and scoring as ONNX, and a script that scores one user's rows
    with only numpy and onnxruntime."""
    write(Result.load(folder), output, user, new_items)
    size = (output / "model.onnx").stat().st_size
    typer.echo(f"{size / 1e6:,.1f} MB: {output / 'model.onnx'}")
    rows = output / "rows.csv" if user else "ROWS.csv"
    typer.echo(f"next: python {output / 'score.py'} {rows} --top 10")
