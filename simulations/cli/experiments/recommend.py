# SPDX-License-Identifier: Apache-2.0
"""`fedrec recommend`: recommendation lists of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulations.cli import options
from simulations.cli.data.table_output import refuse_unusable, write_table

if TYPE_CHECKING:
    import pandas as pd

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of formulas in spreadsheets


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
        typer.echo(_csv(found), nl=False)
        return
    write_table(found, output, _csv(found) if output.suffix == ".csv" else None)
    count = f"{len(served):,} user{'' if len(served) == 1 else 's'}"
    typer.echo(f"{len(found):,} recommendations for {count}: {output}")


def _csv(table: pd.DataFrame) -> str:
    """The table as CSV. A text that a spreadsheet would take for a formula begins with an
    apostrophe, which spreadsheets do not show."""

    def harmless(value: object) -> object:
        formula = isinstance(value, str) and value.startswith(_FORMULA) and not _is_number(value)
        return f"'{value}" if formula else value

    return table.map(harmless).to_csv(index=False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
