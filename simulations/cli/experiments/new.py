# SPDX-License-Identifier: Apache-2.0
"""`fedrec new`: write a package with a component of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new(
    kind: Annotated[
        str,
        typer.Argument(
            help=(
                "strategy, step, model, dataset, split, sampler, perturbation, callback, baseline"
                " or attack."
            )
        ),
    ],
    name: Annotated[str, typer.Argument(help="Name in experiments, such as my-idea.")],
    into: Annotated[
        Path, typer.Option(help="Folder in which the package's folder is made.")
    ] = Path(),
) -> None:
    """Write a small package: code, experiment, contract test, README. It works as it is; then make
    it yours."""
    from simulations.scaffold.package import write_package

    target = write_package(kind, name, into)
    typer.echo(f"wrote {target}: see {target / 'README.md'}")
