# SPDX-License-Identifier: Apache-2.0
"""Commands that run experiments: `fedrec run`, `resume` and `demo`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.report.inputs import inputs_line
from fedrec.report.privacy_total import shown_together
from fedrec.runs.folder import Result
from fedrec.runs.ids import runs_directory, stamp
from server.callbacks.base import Progress
from simulations import runner
from simulations.cli import options, studies
from simulations.cli.finishing import finish, watched
from simulations.cli.options import Quiet, RunOutput, overrides_of, setting_option
from simulations.demo import ROWS
from simulations.demo import demo as demonstrate
from simulations.own_table import OwnTable

Column = Annotated[str | None, typer.Option(help="Name of the column, if it is not recognised.")]
Unrated = Annotated[
    bool, typer.Option("--no-rating", help="The table has no ratings: every row counts as liked.")
]
Header = Annotated[
    bool | None,
    typer.Option(help="Whether the first line has names, else 1, 2 and so on. Default: detected."),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Target epsilon of user-level differential privacy; with ratings add --set"
        " positive-above=... or --no-rating."
    ),
]
System = Annotated[
    str | None,
    typer.Option(help="linear, als or popularity; default: the best on validation users."),
]
TimeFormat = Annotated[
    str | None, setting_option("time-format", of="fedrec.data.readers.table:TableConfig")
]
Vectors = Annotated[
    list[Path] | None, setting_option("item-vectors", of="fedrec.data.readers.table:TableConfig")
]


def run(
    experiment: Annotated[
        str | None, typer.Argument(help="A TOML file, or the name of a shipped experiment.")
    ] = None,
    overrides: Annotated[
        list[str] | None, options.overrides("Override a key, such as strategy.server-lr=0.5.")
    ] = None,
    engine: Annotated[str | None, setting_option("engine.name")] = None,
    nodes: Annotated[str | None, setting_option("engine.nodes")] = None,
    device: Annotated[str | None, setting_option("engine.device")] = None,
    seed: Annotated[str | None, setting_option("seed")] = None,
    ray_address: Annotated[str | None, setting_option("engine.ray-address")] = None,
    output: RunOutput = None,
    data: Annotated[
        Path | None, typer.Option(help="Your own CSV, Parquet or JSON file of interactions.")
    ] = None,
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
    go_on: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --output if it exists.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option(help="Replace the run in --output if it exists.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment; or, with --data, train a federated recommender on your own table, and
    compare it with popularity and centralised EASE."""
    flags = {
        "engine.name": engine,
        "engine.nodes": nodes,
        "engine.device": device,
        "engine.ray-address": ray_address,
        "seed": seed,
    }
    settings = [*(overrides or []), *overrides_of(flags)]
    roles = {"user": user, "item": item, "rating": rating, "time": time}
    columns = {role: name for role, name in roles.items() if name is not None}
    vectors = tuple(item_vectors or ())
    table = OwnTable(columns, no_rating, time_format, epsilon, system, vectors, header)
    if data is not None and experiment is None:
        wanted = table.experiment(data, settings, quiet)
    elif experiment is not None and data is None and table == OwnTable():
        wanted = load(experiment, settings)
    else:
        raise ExperimentError(
            "give either an experiment or --data, not both",
            expected="an experiment, or --data TABLE (with --user, --item, --rating, --time,"
            " --time-format, --header, --system, --epsilon, --item-vectors)",
            got="both, or table options without --data" if experiment or data else "neither",
            fix="fedrec run privrec-synthetic (for a private one, --set privacy.epsilon=5), or"
            " fedrec run --data ratings.csv",
        )
    finish(wanted, output, quiet, go_on=go_on, overwrite=overwrite)


def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder, or folder of a sweep.")],
    overrides: Annotated[
        list[str] | None, options.overrides("Change a key, such as rounds=200 for more rounds.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its newest checkpoint, or the unfinished runs of a sweep."""
    if (folder / "sweep.json").is_file():
        studies.resume(folder, quiet)
        return
    watched(
        folder, quiet, lambda callbacks: runner.resume(folder, overrides or [], callbacks=callbacks)
    )


# `fedrec demo`: five runs, one table and a report, offline.

_METRIC = "hits@10"


def demo(
    output: Annotated[Path | None, options.output("Folder of the runs and the report.")] = None,
) -> None:
    """Train PrivRec on Ray in one stage, in two stages and with differential privacy, and linear
    systems and popularity, on synthetic data; print a table and write a report. Works offline."""
    folder = output or runs_directory() / f"demo-{stamp()}"
    shown: list[Progress] = []
    results: list[Result] = []

    def watched() -> list[Progress]:
        shown.append(Progress())
        return shown[-1:]

    def show(result: Result) -> None:
        shown[-1].close()
        results.append(result)

    rows, page = demonstrate(folder, callbacks=watched, show=show)
    _print(rows, results)
    typer.echo(f"report: {page}")


def _print(rows: Mapping[str, Mapping[str, Any]], results: list[Result]) -> None:
    table = Table("system", _METRIC, "epsilon", "description")
    for row in ROWS:
        epsilon = rows[row.system]["epsilon"]
        private = epsilon is not None and math.isfinite(epsilon)
        spent = f"{epsilon:.2f}" if private else "-"
        table.add_row(row.system, f"{rows[row.system][_METRIC]:.3f}", spent, row.what)
    console = Console()
    console.print(table)
    private = next(result for result in results if result.privacy)
    count = len(results[0].users)
    seed = results[0].experiment.seed
    console.print(f"The same {count} test users in each row, seed {seed}.", highlight=False)
    for line in [
        inputs_line({row.system: rows[row.system]["inputs"] for row in ROWS}),
        *private.privacy[:1],
        *shown_together([result.folder for result in results]),
    ]:
        console.print(line, highlight=False)
