# SPDX-License-Identifier: Apache-2.0
"""`fedrec privacy users`: true and requested epsilons of users who add their own noise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulations.cli import options

_KEY = "Override a key of the experiment, such as step.epsilon=0.5; may repeat."


def users(
    experiment: Annotated[
        str,
        typer.Argument(help="Experiment whose users add their own noise (step dpvae or dpsgd)."),
    ],
    overrides: Annotated[list[str] | None, options.overrides(_KEY)] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Number of rounds; default: all of the experiment.")
    ] = None,
    output: Annotated[Path | None, options.output("Output CSV file with one row per user.")] = None,
) -> None:
    """Compute each user's true epsilon beside the requested one; no training is needed."""
    from rich.console import Console
    from rich.table import Table

    from fedrec.experiment.loading import load
    from fedrec.privacy.personal.report import summary, words
    from fedrec.runtime.atomic_files import write_atomically
    from simulations.personal_epsilons import personal_epsilons, personal_noise

    loaded = load(experiment, overrides or [])
    table = personal_epsilons(loaded, rounds)
    shown = Table("", "least", "10%", "median", "90%", "most", box=None, padding=(0, 2, 0, 0))
    for name, spread in summary(table).items():
        shown.add_row(
            name,
            *(value if isinstance(value, str) else f"{value:.4g}" for value in spread.values()),
        )
    Console().print(shown)
    for line in words(personal_noise(loaded), table):
        typer.echo(line)
    if output is not None:
        write_atomically(output, table.to_csv())
        typer.echo(output)
