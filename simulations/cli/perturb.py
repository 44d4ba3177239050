# SPDX-License-Identifier: Apache-2.0
"""`fedrec perturb`: what the `[perturb]` table of an experiment does to its data, and what it is worth."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer


def perturb(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="A TOML file, or the name of a shipped experiment.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Override a key: --set perturb.budget=0.3")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Perturb an experiment's data as its devices would, and report nominal and true epsilons; nothing is trained."""
    from fedrec.data.population import Population
    from fedrec.errors import ExperimentError
    from fedrec.experiment import load
    from fedrec.perturb.report import summary

    loaded = load(experiment, overrides or [])
    population = Population.of(loaded)
    if population.perturbed is None:
        raise ExperimentError(
            f"experiment {loaded.name!r} perturbs nothing",
            expected="a table [perturb]",
            got="none",
            fix="--set perturb.attribute=gender --set perturb.epsilon=1",
        )
    found = summary(population.interactions, population.perturbed)
    typer.echo(json.dumps(_finite(found), indent=2)) if as_json else _print(found)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("epsilon", "least", "median", "most"):
        shown.add_column(column, justify="left" if column == "epsilon" else "right")
    for name, spread in found["epsilon"].items():
        shown.add_row(name, *(f"{value:.4g}" for value in spread.values()))
    console = Console()
    console.print(shown)
    console.print(
        f"{found['clients']} clients, {found['rows']} training rows, {found['protected']} protected, "
        f"{found['changed']:.1%} of these now with another item.",
        highlight=False,
    )
    for line in found["in words"]:
        console.print(line, highlight=False)


def _finite(value: Any) -> Any:
    """The same with infinities as text, because JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
