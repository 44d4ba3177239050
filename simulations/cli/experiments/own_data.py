# SPDX-License-Identifier: Apache-2.0
"""`fedrec try`: a table of ratings or purchases, and a federated recommender on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from simulations.cli.experiments.finishing import finish

Column = Annotated[str | None, typer.Option(help="Name of the column, where it is not recognised.")]


def try_(
    data: Annotated[Path, typer.Argument(help="A CSV or Parquet file, one interaction per row.")],
    user: Column = None,
    item: Column = None,
    rating: Column = None,
    time: Column = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Target of user-level differential privacy; default: no privacy."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Override a key of the experiment.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the experiment.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Run folder, new or empty.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing but the run folder.")
    ] = False,
) -> None:
    """Run a federated recommender on your own table, beside popularity and centralised EASE."""
    columns = {"user": user, "item": item, "rating": rating, "time": time}
    table = own_table(data, columns, epsilon, quiet=quiet)
    given = [f"seed={seed}"] if seed is not None else []
    finish(table, [*(overrides or []), *given], output, quiet)


def own_table(
    data: Path, columns: dict[str, str | None], epsilon: float | None, *, quiet: bool
) -> dict[str, Any]:
    """The experiment on a table, after saying what its columns were taken for."""
    from fedrec.data.files.recognition import recognise
    from simulations.own_data import own_experiment

    found = recognise(data, {role: name for role, name in columns.items() if name})
    if not quiet:
        typer.echo(f"{data}:", err=True)
        for line in found.lines():
            typer.echo(f"  {line}", err=True)
        typer.echo(
            "  no features of users or items: the system learns from who likes what alone;"
            " models that know users by features, such as privrec, would learn nothing here",
            err=True,
        )
    return own_experiment(data, found, epsilon=epsilon)
