# SPDX-License-Identifier: Apache-2.0
"""`fedrec try`: train a federated recommender on a table of ratings or purchases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from simulations.cli.experiments.finishing import finish

Column = Annotated[str | None, typer.Option(help="Name of the column, if it is not recognised.")]


def try_(
    data: Annotated[Path, typer.Argument(help="CSV or Parquet file with one interaction per row.")],
    user: Column = None,
    item: Column = None,
    rating: Column = None,
    time: Column = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Target epsilon of user-level differential privacy; default: no privacy."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Override a key of the experiment.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the experiment.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Run folder: new or empty.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the run folder.")
    ] = False,
) -> None:
    """Train a federated recommender on your own table, and compare it with popularity and
    centralised EASE."""
    columns = {"user": user, "item": item, "rating": rating, "time": time}
    table = own_table(data, columns, epsilon, quiet=quiet)
    given = [f"seed={seed}"] if seed is not None else []
    finish(table, [*(overrides or []), *given], output, quiet)


def own_table(
    data: Path, columns: dict[str, str | None], epsilon: float | None, *, quiet: bool
) -> dict[str, Any]:
    """The experiment on a table, after printing how its columns were recognised."""
    from fedrec.data.files.recognition import recognise
    from simulations.own_data import own_experiment

    found = recognise(data, {role: name for role, name in columns.items() if name})
    if not quiet:
        typer.echo(f"{data}:", err=True)
        for line in found.lines():
            typer.echo(f"  {line}", err=True)
        typer.echo(
            "  no user or item features: the system learns from interactions only; models that"
            " represent users by features, such as privrec, would learn nothing here",
            err=True,
        )
    return own_experiment(data, found, epsilon=epsilon)
