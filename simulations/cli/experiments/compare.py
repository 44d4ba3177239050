# SPDX-License-Identifier: Apache-2.0
"""`fedrec compare`: paired comparison of systems over users."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulations.cli import options
from simulations.cli.experiments.finishing import wide_console

_FILE_WIDTH = 240  # columns of a table that goes into a file or a pipe
_FORMATS = {".csv": "csv", ".md": "markdown", ".tex": "latex"}


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs on the same data, or of sweeps.")
    ],
    metric: Annotated[
        str | None, typer.Option(help="Metric (column of users.csv); default: hits@10.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="System to compare with; default: that of the first run.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help="Output format: csv, markdown or latex; default: a table."),
    ] = None,
    output: Annotated[Path | None, options.output("Output file: .csv, .md or .tex.")] = None,
) -> None:
    """Compare the systems of one or more runs by paired tests over users (t, Wilcoxon, bootstrap,
    Holm), and over seeds (t) where there are several."""
    from fedrec.errors import ExperimentError
    from fedrec.report.comparison import compare as compared
    from fedrec.report.formats import comparison_notes, comparison_terminal, comparison_text
    from fedrec.report.privacy_total import shown_together
    from fedrec.runs.folder import RunFolder
    from simulations.sweep.folder import with_sweeps

    wanted = form or (_FORMATS.get(output.suffix) if output is not None else None)
    if wanted not in (None, *_FORMATS.values()) or (output is not None and wanted is None):
        raise ExperimentError(
            "no such format",
            expected="csv, markdown or latex; files that end in .csv, .md or .tex",
            got=form or str(output),
            fix="--format csv, or --output comparison.md",
        )
    results = [RunFolder(run).read_result() for run in with_sweeps(runs)]
    found = compared(results, metric=metric, against=against)
    together = shown_together([result.folder for result in results])
    if wanted is None:
        console = wide_console(_FILE_WIDTH)
        for table in comparison_terminal(found, console.width):
            console.print(table)
        for line in comparison_notes(found):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        for line in together:
            console.print(line, highlight=False)
    elif output is None:
        typer.echo(comparison_text(found, wanted), nl=False)  # type: ignore[arg-type]
    else:
        from fedrec.runtime.atomic_files import write_atomically

        write_atomically(output, comparison_text(found, wanted))  # type: ignore[arg-type]
        typer.echo(output)
    if wanted is not None:  # in addition to a table for a program
        for line in together:
            typer.echo(line, err=True)
