# SPDX-License-Identifier: Apache-2.0
"""`fedrec export`: the model of a finished run for devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulations.cli import options


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    output: Annotated[Path, options.output("Output folder: new or empty.")],
    user: Annotated[
        str | None,
        typer.Option(
            help="User id as in the data, whose device it is for; needed where devices hold"
            " parameters of their own."
        ),
    ] = None,
) -> None:
    """Write the model of a finished run with its scoring as ONNX, and a script that scores one
    user's rows with numpy and onnxruntime alone."""
    from fedrec.runs.result import Result
    from simulations.export.folder import export as write

    write(Result.load(folder), output, user)
    size = (output / "model.onnx").stat().st_size
    typer.echo(f"{size / 1e6:,.1f} MB: {output / 'model.onnx'}")
    rows = output / "rows.csv" if user else "ROWS.csv"
    typer.echo(f"next: python {output / 'score.py'} {rows} --top 10")
