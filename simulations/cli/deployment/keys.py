# SPDX-License-Identifier: Apache-2.0
"""`fedrec deploy renew` and `revoke`: new certificates, and keys that are not accepted any more."""

from __future__ import annotations

from shlex import quote
from typing import Annotated

import typer

from simulations.cli.deployment.deploy import Folder


def renew(deployment: Folder) -> None:
    """Replace the certificates of SuperLink, gateway and nodes by new ones, which are valid for 825
    days, for the same keys."""
    from simulations.deployment.renewal import renew as renewed

    files = renewed(deployment)
    folder = quote(str(deployment.path))
    typer.echo(
        f"Next:\n  fedrec deploy down {folder}; fedrec deploy up {folder}\n"
        "and transfer these certificates, which are not secret, to the nodes:",
        err=True,
    )
    for file in files:
        typer.echo(file)


def revoke(
    deployment: Folder,
    node: Annotated[str, typer.Argument(help="Name of the node's folder, such as node-3.")],
) -> None:
    """Refuse the keys of a node from now on, for example after they were stolen."""
    from simulations.deployment import operator
    from simulations.deployment.renewal import revoke as revoked

    changed = revoked(deployment, node)
    if operator.supervisor_of(changed) is not None:
        operator.register_nodes(changed)
        typer.echo(f"{node} is refused")
    else:
        typer.echo(f"{node} is refused from the next `fedrec deploy up` or `register` on")
    typer.echo(
        f"Transfer {changed.revoked} to the other nodes, into the folders that they joined with:"
        " with secure aggregation they then refuse its certificate, too.",
        err=True,
    )
