# SPDX-License-Identifier: Apache-2.0
"""`fedrec synthesise`: write the perturbed training rows, and measure what they reveal of the real
ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from simulations.cli import options
from simulations.cli.data.perturb import Overrides, perturbed_population, print_figures
from simulations.cli.data.table_output import refuse_unusable, write_table
from simulations.cli.options import AsJson, Named

_TITLES = {
    "kept": "kept, share of the real rows that are in the table",
    "replaced": "replaced, share of the table's rows whose item the user does not have",
    "linked": "linked, share of users found by their profile in the table",
    "chance": "linked by guessing",
    "recovered": "original named by a trained attacker, share of replaced rows",
    "frequent": "original named by frequency alone",
}
"""Labels for people; programs (`--json`) get the keys."""


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
