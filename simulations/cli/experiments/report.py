# SPDX-License-Identifier: Apache-2.0
"""`fedrec report`: one self-contained HTML page about one run or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page; default: report.html in the first run."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
) -> None:
    """Write one HTML page: what was run, results, users, privacy, cost, and how to repeat it."""
    from fedrec.report.page.page import report as rendered
    from fedrec.runs.folder import RunFolder
    from fedrec.runtime.atomic_files import write_atomically

    results = [RunFolder(run).read_result() for run in runs]
    file = output or results[0].folder / "report.html"
    write_atomically(file, rendered(results, title=title))
    typer.echo(file)
