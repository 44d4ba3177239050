# SPDX-License-Identifier: Apache-2.0
"""`fedrec try`: train a federated recommender on a table of ratings or purchases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulations.cli import options
from simulations.cli.experiments.finishing import finish
from simulations.cli.options import Quiet, RunOutput, overrides_of, setting_option

if TYPE_CHECKING:
    from fedrec.errors import ExperimentError
    from fedrec.experiment.schema import Experiment

Column = Annotated[str | None, typer.Option(help="Name of the column, if it is not recognised.")]
Unrated = Annotated[
    bool, typer.Option("--no-rating", help="No column holds ratings: every row counts as liked.")
]
Header = Annotated[
    bool | None,
    typer.Option(
        help="Whether the first line of a CSV file has the names of the columns; without them they"
        " are named 1, 2 and so on. Default: as it looks."
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Target epsilon of user-level differential privacy; default: no privacy. With ratings,"
        " --set positive-above=... or --no-rating says which are liked."
    ),
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


def try_(
    data: Annotated[
        Path, typer.Argument(help="CSV, Parquet or JSON file with one interaction per row.")
    ],
    user: Column = None,
    item: Column = None,
    rating: Column = None,
    time: Column = None,
    time_format: TimeFormat = None,
    no_rating: Unrated = False,
    header: Header = None,
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
    table = OwnTable(
        columns, no_rating, time_format, epsilon, system, tuple(item_vectors or ()), header
    )
    given = [*(overrides or []), *overrides_of({"seed": seed})]
    finish(table.experiment(data, given, quiet), output, quiet)


@dataclass(frozen=True)
class OwnTable:
    """What is said of a table of the user's own.

    Attributes:
        columns: by role, the name of the column; None if it is to be recognised. For ratings,
            "none" or nothing means that there are none.
        unrated: whether no column holds ratings.
        time_format: form of the dates, as of `strptime`; None: ISO or dotted.
        epsilon: target of user-level differential privacy, > 0; None: no privacy.
        system: see `simulations.own_data.try_table`.
        item_vectors: files of dense vectors of the items.
        header: whether the first line has names; None: as it looks.
    """

    columns: Mapping[str, str | None]
    unrated: bool = False
    time_format: str | None = None
    epsilon: float | None = None
    system: str | None = None
    item_vectors: tuple[Path, ...] = ()
    header: bool | None = None

    def is_empty(self) -> bool:
        """Whether nothing is said."""
        named = (self.time_format, self.system, self.epsilon, self.header, *self.columns.values())
        return not (self.unrated or self.item_vectors) and all(one is None for one in named)

    def experiment(self, data: Path, overrides: list[str], quiet: bool) -> Experiment:
        """The experiment on the table, after printing how its columns were recognised.

        Args:
            data: the table.
            overrides: as for `--set`.
            quiet: print nothing.

        Raises:
            ExperimentError: a column of ratings is named, and `unrated` is set; an override names
                another dataset; epsilon is no number > 0, there are too few users for it, or see
                `simulations.tables.table_facts.TableFacts.of`.
            DataError: see `recognise`.
        """
        from fedrec.experiment.loading import read
        from simulations.own_data import own_experiment

        given = {role: name for role, name in self.columns.items() if name is not None}
        rated = not self.unrated and given.get("rating") not in _NO_COLUMN
        if self.unrated and given.get("rating", "none") not in _NO_COLUMN:
            raise _two_answers(given["rating"])
        if not rated:
            given.pop("rating", None)
        dataset = read({}, overrides).get("dataset")
        said = dataset.get("header") if isinstance(dataset, dict) else None
        tell = _silent if quiet else _printed
        tell(f"{data}:")
        return own_experiment(
            data,
            given,
            lambda line: tell(f"  {line}"),
            rated=rated,
            header=self.header if said is None else said,
            time_format=self.time_format,
            epsilon=self.epsilon,
            system=self.system,
            overrides=overrides,
            item_vectors=self.item_vectors,
        )


def _printed(line: str) -> None:
    typer.echo(line, err=True)


def _silent(line: str) -> None:
    """Prints nothing."""


def _two_answers(column: str) -> ExperimentError:
    from fedrec.errors import ExperimentError

    return ExperimentError(
        "two answers to which column holds ratings",
        expected="--rating COLUMN or --no-rating",
        got=f"--rating {column} --no-rating",
        fix="leave one of them out",
    )
