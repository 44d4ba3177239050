# SPDX-License-Identifier: Apache-2.0
"""`fedrec report`: a self-contained HTML page about one or more runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulations.cli import options
from simulations.cli.experiments.finishing import refuse_other_page


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, or of sweeps.")],
    output: Annotated[
        Path | None, options.output("Output file; default: report.html in the first folder.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
) -> None:
    """Write an HTML report: settings, results, users, privacy, cost, and how to repeat the runs."""
    from fedrec.report.page.page import report as rendered
    from fedrec.runs.folder import RunFolder
    from fedrec.runtime.atomic_files import write_atomically
    from simulations.sweep.folder import with_sweeps

    refuse_other_page(output)
    results = [RunFolder(run).read_result() for run in with_sweeps(runs)]
    file = output or runs[0] / "report.html"
    write_atomically(file, rendered(results, title=title))
    typer.echo(file)
