# SPDX-License-Identifier: Apache-2.0
"""`fedrec new`: create a package with a new component."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new(
    kind: Annotated[
        str,
        typer.Argument(
            help=(
                "Kind of component: strategy, step, model, dataset, split, sampler, perturbation,"
                " callback, baseline, metric, mechanism, compression, attack or poisoning."
            )
        ),
    ],
    name: Annotated[
        str, typer.Argument(help="Name of the component in experiments, such as my-idea.")
    ],
    into: Annotated[Path, typer.Option(help="Folder in which the package is created.")] = Path(),
) -> None:
    """Create a small working package: code, experiment, contract test and README."""
    from simulations.scaffold.package import write_package

    target = write_package(kind, name, into)
    typer.echo(f"wrote {target}: see {target / 'README.md'}")
