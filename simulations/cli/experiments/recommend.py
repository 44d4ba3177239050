# SPDX-License-Identifier: Apache-2.0
"""`fedrec recommend`: recommendation lists of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulations.cli import options
from simulations.cli.data.table_output import refuse_unusable, write_table


def recommend(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    top: Annotated[int, typer.Option(help="Number of items per user.")] = 10,
    users: Annotated[
        list[str] | None,
        typer.Option("--user", help="User id as in the data; may repeat; default: all users."),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            help="Table of rows that are not in the data, with its columns, such as those of new"
            " users; its users are served."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        options.output("Output file: .csv or .parquet; default: print as CSV."),
    ] = None,
) -> None:
    """Recommend new items to users with the model of a finished run."""
    from fedrec.report.formats import csv_text
    from fedrec.runs.result import Result

    if output is not None:
        refuse_unusable(output)
    found = Result.load(folder).recommend(users, k=top, history=history)
    served = set(found["user"].astype(str))
    for user in users or []:
        if user not in served:
            typer.echo(
                f"User {user!r} has a row of every item, so there is nothing new to recommend.",
                err=True,
            )
    if output is None:
        typer.echo(csv_text(found), nl=False)
        return
    write_table(found, output, csv_text(found) if output.suffix == ".csv" else None)
    count = f"{len(served):,} user{'' if len(served) == 1 else 's'}"
    typer.echo(f"{len(found):,} recommendations for {count}: {output}")
