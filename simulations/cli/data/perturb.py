# SPDX-License-Identifier: Apache-2.0
"""`fedrec perturb`: the effect of an experiment's `[perturb]` table on its data, and its guarantee;
`fedrec synthesise`: the perturbed rows as a file, and what they reveal of the real ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulations.cli import options
from simulations.cli.data.table_output import refuse_unusable, write_table
from simulations.cli.options import AsJson, Named

if TYPE_CHECKING:
    from fedrec.data.perturbation import Perturbed
    from fedrec.data.population import Population
    from fedrec.experiment.schema import Experiment

Overrides = Annotated[
    list[str] | None, options.overrides("Override a key: --set perturb.budget=0.3")
]


_TITLES = {
    "kept": "kept, share of the real rows that are in the table",
    "replaced": "replaced, share of the table's rows whose item the user does not have",
    "linked": "linked, share of users found by their profile in the table",
    "chance": "linked by guessing",
    "recovered": "original named by a trained attacker, share of replaced rows",
    "frequent": "original named by frequency alone",
}
"""Labels for people; programs (`--json`) get the keys."""


def perturb(experiment: Named, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Apply an experiment's perturbation without training, and report its effect and its
    guarantee."""
    from fedrec.data.perturbation import perturbation_of
    from fedrec.experiment.loading import load
    from fedrec.runtime.strict_json import finite

    loaded = load(experiment, overrides or [])
    population, perturbed = perturbed_population(loaded)
    found = {
        "clients": len(population.training_clients),
        "rows": len(population.partition.train_rows),
        "learned rows": len(perturbed.rows),
        **perturbed.figures,
        "in words": perturbation_of(loaded).words(),  # type: ignore[union-attr]
    }
    typer.echo(json.dumps(finite(found), indent=2)) if as_json else print_figures(found)


def synthesise(
    experiment: Named,
    output: Annotated[Path, options.output("Output file: .csv or .parquet.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write the synthetic training rows of an experiment with a table [perturb], and measure what
    they reveal of the real ones.

    For example: fedrec synthesise upc-sdg-office --output synthetic.csv
    """
    from fedrec.data.perturbation import perturbation_of
    from fedrec.experiment.loading import load
    from fedrec.perturb.disclosure import disclosure
    from fedrec.perturb.mean_similarity import FIGURE, measured_similarity
    from fedrec.runtime.strict_json import finite

    refuse_unusable(output)
    loaded = load(experiment, overrides or [])
    population, perturbed = perturbed_population(loaded)
    real = population.interactions.with_rows(population.partition.train_rows)
    write_table(perturbed.rows.frame(), output)
    figures = dict(perturbed.figures)
    if FIGURE not in figures and (found := measured_similarity(real, perturbed, loaded.seed)):
        figures[FIGURE] = found
    found = {
        "table": str(output),
        "rows": len(perturbed.rows),
        "training rows": len(real),
        **disclosure(real, perturbed, loaded.seed).table(),
        **figures,
        "in words": perturbation_of(loaded).words(),  # type: ignore[union-attr]
    }
    if as_json:
        typer.echo(json.dumps(finite(found), indent=2))
    else:
        print_figures({_TITLES.get(name, name): value for name, value in found.items()})


def perturbed_population(experiment: Experiment) -> tuple[Population, Perturbed]:
    """The population of an experiment, and its perturbed training rows.

    Raises:
        ExperimentError: it perturbs nothing.
    """
    from fedrec.data.population import Population
    from fedrec.errors import ExperimentError

    if experiment.perturb is None:
        raise ExperimentError(
            f"experiment {experiment.name!r} perturbs nothing",
            expected="a table [perturb]",
            got="none",
            fix="--set perturb.name=random-replacement, or another of `fedrec list perturbation`",
        )
    population = Population.of(experiment)
    return population, population.perturbed  # type: ignore[return-value]


def print_figures(found: dict[str, Any]) -> None:
    """Counts and shares line by line, spreads over clients as tables, and last the sentences."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for name, value in found.items():
        if isinstance(value, dict):
            console.print(_table(name, value, Table))
        elif name != "in words":
            console.print(f"{name}: {_shown(value)}", highlight=False)
    for line in found.get("in words", ()):
        console.print(line, highlight=False)


def _table(name: str, rows: dict[str, Any], kind: Any) -> Any:
    """One row per entry: its value, or the values of a table below it in columns."""
    nested = [value for value in rows.values() if isinstance(value, dict)]
    shown = kind(box=None, padding=(0, 2, 0, 0))
    shown.add_column(name)
    for column in nested[0] if nested else ("",):
        shown.add_column(column, justify="right")
    for key, value in rows.items():
        values = value.values() if isinstance(value, dict) else [value]
        shown.add_row(str(key), *(_shown(one) for one in values))
    return shown


def _shown(value: Any) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "nothing to measure"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
