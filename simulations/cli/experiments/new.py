# SPDX-License-Identifier: Apache-2.0
"""`fedrec new`: create a module with a new component."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new(
    kind: Annotated[
        str,
        typer.Argument(
            help=(
                "Kind of component: dataset, split, model, step, strategy, baseline, metric or"
                " attack."
            )
        ),
    ],
    name: Annotated[
        str, typer.Argument(help="Name of the component, such as my-idea, which is my_idea:MyIdea.")
    ],
    into: Annotated[Path, typer.Option(help="Folder in which both files are made.")] = Path(),
) -> None:
    """Create a working component in a module of its own, and the test of its contract."""
    from simulations.scaffold.package import write_component

    file, test, full_name = write_component(kind, name, into)
    typer.echo(f"wrote {file} and {test}")
    typer.echo(f'Its name in experiments is "{full_name}", with its folder on Python\'s path')
    typer.echo("(export PYTHONPATH=.); pytest runs the test of its contract.")
