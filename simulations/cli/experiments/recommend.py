# SPDX-License-Identifier: Apache-2.0
"""`fedrec recommend`: recommendation lists of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import pandas as pd


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
        typer.Option(
            "--output", "-o", help="Output file: .csv or .parquet; default: print as CSV."
        ),
    ] = None,
) -> None:
    """Recommend new items to users with the model of a finished run."""
    from fedrec.errors import ExperimentError
    from fedrec.runs.result import Result

    if output is not None and output.suffix not in (".csv", ".parquet", ".pq"):
        raise ExperimentError(
            f"unknown format of {output}",
            expected="a file that ends in .csv or .parquet",
            got=output.suffix or "no ending",
        )
    found = Result.load(folder).recommend(users, k=top, history=history)
    if output is None:
        typer.echo(found.to_csv(index=False), nl=False)
        return
    _write(found, output)
    count = len(set(found["user"]))
    served = f"{count:,} user{'' if count == 1 else 's'}"
    typer.echo(f"{len(found):,} recommendations for {served}: {output}")


def _write(table: pd.DataFrame, output: Path) -> None:
    import io

    from fedrec.errors import DataError
    from fedrec.runtime.atomic_files import open_atomically, write_atomically

    if output.suffix == ".csv":
        write_atomically(output, table.to_csv(index=False))
        return
    try:
        content = io.BytesIO()
        table.to_parquet(content, index=False)
    except ImportError:
        raise DataError(
            "writing Parquet needs pyarrow",
            expected="the optional package pyarrow",
            got="not installed",
            fix="pip install 'fedrec[parquet]', or write a .csv file",
        ) from None
    with open_atomically(output) as file:
        file.write(content.getvalue())
