# SPDX-License-Identifier: Apache-2.0
"""`fedrec data split`: the rows of a run and their parts, with the data's own ids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulations.cli import options
from simulations.cli.data.table_output import refuse_unusable, write_table


def split(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    output: Annotated[Path, options.output("Output file: .csv or .parquet.")],
) -> None:
    """Write the rows of a run with the part that each is in: training, known (of a user who does
    not train), validation or test.

    For example: fedrec data split runs/films -o split.csv
    """
    import numpy as np

    from fedrec.data.population import Population
    from fedrec.errors import DataError
    from fedrec.runs.folder import RunFolder
    from fedrec.runs.ids import read_ids

    refuse_unusable(output)
    folder = RunFolder(run)
    population = Population.of(folder.experiment)
    rows = population.interactions
    now = rows.user_ids.astype(str), rows.item_ids.astype(str)
    if not all(map(np.array_equal, now, read_ids(folder.path) or now)):
        raise DataError(
            f"the data of {run} have changed since",
            expected="the users and items of the run, which its split is of",
            got=f"{rows.num_users:,} users and {rows.num_items:,} items, not all the same",
            fix="restore the data as they were, or run again",
        )
    table = rows.frame()
    table["part"] = population.partition.parts(rows)
    counts = table["part"].value_counts()
    write_table(table.loc[table["part"] != ""], output)
    typer.echo(
        ", ".join(f"{count:,} {part or 'left out'}" for part, count in counts.items()), err=True
    )
    typer.echo(output)
