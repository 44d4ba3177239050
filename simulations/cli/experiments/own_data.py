# SPDX-License-Identifier: Apache-2.0
"""`fedrec try`: train a federated recommender on a table of ratings or purchases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulations.cli import options
from simulations.cli.experiments.finishing import finish
from simulations.cli.options import Quiet, RunOutput, overrides_of, setting_option

if TYPE_CHECKING:
    from fedrec.experiment.schema import Experiment

Column = Annotated[str | None, typer.Option(help="Name of the column, if it is not recognised.")]
Unrated = Annotated[
    bool, typer.Option("--no-rating", help="No column holds ratings: every row counts as liked.")
]
Epsilon = Annotated[
    float | None,
    typer.Option(help="Target epsilon of user-level differential privacy; default: no privacy."),
]
System = Annotated[
    str | None,
    typer.Option(help="linear, als or popularity; default: the best one on validation users."),
]
TimeFormat = Annotated[
    str | None, setting_option("time-format", of="fedrec.data.readers.table:TableConfig")
]
Vectors = Annotated[
    list[Path] | None,
    setting_option("item-vectors", of="fedrec.data.readers.table:TableConfig"),
]
_NO_COLUMN = ("", "none")
_NO_FEATURES = (
    "no user or item features: the system learns from interactions only; models that represent"
    " users by features, such as privrec, would learn nothing here"
)


def try_(
    data: Annotated[Path, typer.Argument(help="CSV or Parquet file with one interaction per row.")],
    user: Column = None,
    item: Column = None,
    rating: Column = None,
    time: Column = None,
    time_format: TimeFormat = None,
    no_rating: Unrated = False,
    epsilon: Epsilon = None,
    system: System = None,
    item_vectors: Vectors = None,
    overrides: Annotated[list[str] | None, options.overrides()] = None,
    seed: Annotated[str | None, setting_option("seed")] = None,
    output: RunOutput = None,
    quiet: Quiet = False,
) -> None:
    """Train a federated recommender on your own table, and compare it with popularity and
    centralised EASE."""
    columns = {"user": user, "item": item, "rating": rating, "time": time}
    given = [*(overrides or []), *overrides_of({"seed": seed})]
    experiment = own_table(
        data,
        columns,
        epsilon,
        unrated=no_rating,
        time_format=time_format,
        system=system,
        overrides=given,
        quiet=quiet,
        item_vectors=item_vectors or (),
    )
    finish(experiment, output, quiet)


def own_table(
    data: Path,
    columns: dict[str, str | None],
    epsilon: float | None,
    *,
    unrated: bool,
    overrides: list[str],
    quiet: bool,
    time_format: str | None = None,
    system: str | None = None,
    item_vectors: Sequence[Path] = (),
) -> Experiment:
    """The experiment on a table, after printing how its columns were recognised.

    Args:
        data: the table.
        columns: by role, the name of the column; None if it is to be recognised. For ratings,
            "none" or nothing means that there are none.
        epsilon: target of user-level differential privacy, > 0; None: no privacy.
        unrated: whether no column holds ratings.
        overrides: as for `--set`.
        quiet: print nothing.
        time_format: form of the dates, as of `strptime`; None: ISO or dotted.
        system: see `simulations.own_data.try_table`.
        item_vectors: files of dense vectors of the items.

    Raises:
        ExperimentError: a column of ratings is named, and `unrated` is set; an override names
            another dataset; or epsilon is no number > 0, or there are too few users for it.
        DataError: see `recognise`.
    """
    from fedrec.data.files.recognition import recognise
    from fedrec.errors import ExperimentError
    from simulations.own_data import own_system, warnings

    given = {role: name for role, name in columns.items() if name is not None}
    if given.get("rating", "none") in _NO_COLUMN:
        unrated = given.pop("rating", None) is not None or unrated
    elif unrated:
        raise ExperimentError(
            "two answers to which column holds ratings",
            expected="--rating COLUMN or --no-rating",
            got=f"--rating {given['rating']} --no-rating",
            fix="leave one of them out",
        )
    found = recognise(data, given, rated=not unrated, time_format=time_format)
    if not quiet:
        typer.echo(f"{data}:", err=True)
        bare = [] if item_vectors else [_NO_FEATURES]
        for line in (*found.lines(), *bare, *warnings(found)):
            typer.echo(f"  {line}", err=True)
    own = own_system(
        data, found, epsilon=epsilon, system=system, overrides=overrides, item_vectors=item_vectors
    )
    for line in () if quiet else own.lines():
        typer.echo(f"  {line}", err=True)
    return own.experiment
