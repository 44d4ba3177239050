# SPDX-License-Identifier: Apache-2.0
"""`fedrec run` and `fedrec resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulations.cli import options
from simulations.cli.experiments.finishing import finish, watched
from simulations.cli.experiments.own_data import (
    Column,
    Epsilon,
    Header,
    OwnTable,
    System,
    TimeFormat,
    Unrated,
    Vectors,
)
from simulations.cli.options import Quiet, RunOutput, overrides_of, setting_option

if TYPE_CHECKING:
    from fedrec.experiment.schema import Experiment


def _shipped(incomplete: str) -> list[str]:
    from fedrec.experiment.loading import shipped_experiments

    return [name for name in shipped_experiments() if name.startswith(incomplete)]


def run(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="A TOML file, or the name of a shipped experiment.", autocompletion=_shipped
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        options.overrides("Override a key, such as strategy.server-lr=0.5; may repeat."),
    ] = None,
    engine: Annotated[str | None, setting_option("engine.name")] = None,
    nodes: Annotated[str | None, setting_option("engine.nodes")] = None,
    device: Annotated[str | None, setting_option("engine.device")] = None,
    seed: Annotated[str | None, setting_option("seed")] = None,
    ray_address: Annotated[str | None, setting_option("engine.ray-address")] = None,
    output: RunOutput = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Your own CSV, Parquet or JSON file instead of an experiment, see `fedrec try`."
        ),
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
    """Run an experiment."""
    flags = {
        "engine.name": engine,
        "engine.nodes": nodes,
        "engine.device": device,
        "engine.ray-address": ray_address,
        "seed": seed,
    }
    settings = [*(overrides or []), *overrides_of(flags)]
    columns = {"user": user, "item": item, "rating": rating, "time": time}
    table = OwnTable(
        columns, no_rating, time_format, epsilon, system, tuple(item_vectors or ()), header
    )
    wanted = _wanted(experiment, data, table, settings, quiet)
    finish(wanted, output, quiet, go_on=go_on, overwrite=overwrite)


def _wanted(
    experiment: str | None, data: Path | None, table: OwnTable, overrides: list[str], quiet: bool
) -> Experiment:
    """The experiment to run: the named one, or one on the user's own table."""
    from fedrec.errors import ExperimentError
    from fedrec.experiment.loading import load

    if data is not None and experiment is None:
        return table.experiment(data, overrides, quiet)
    if experiment is not None and data is None and table.is_empty():
        return load(experiment, overrides)
    raise ExperimentError(
        "the experiment to run is not clear",
        expected="an experiment, or a table with --data (and --user, --item, --rating, --time,"
        " --time-format, --header, --system, --epsilon, --item-vectors)",
        got="neither"
        if experiment is None and data is None
        else "both, or options of a table without one",
        fix="fedrec run privrec-synthetic (for a private one, --set privacy.epsilon=5), or fedrec"
        " run --data ratings.csv",
    )


def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder, or folder of a sweep.")],
    overrides: Annotated[
        list[str] | None,
        options.overrides("Change a key, such as rounds=200 for more rounds; may repeat."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its newest checkpoint, or a sweep with its unfinished runs."""
    from simulations.cli.experiments import sweep

    if sweep.is_sweep(folder):
        sweep.resume(folder, quiet)
        return
    from simulations import runner

    watched(
        folder, quiet, lambda callbacks: runner.resume(folder, overrides or [], callbacks=callbacks)
    )
