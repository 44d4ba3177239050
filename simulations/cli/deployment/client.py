# SPDX-License-Identifier: Apache-2.0
"""`fedrec client`: one real client on its own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def client(
    join: Annotated[
        Path,
        typer.Option(help="Folder received from the operator: node.key, ca.crt, catalogue.json."),
    ],
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the deployment's gateway.")],
    data: Annotated[
        Path | None,
        typer.Option(help="CSV file of one or more users; it never leaves this machine."),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Folder of the private state; default: JOIN/state.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address on which the executor reaches the SuperNode.")
    ] = "127.0.0.1",
    bind: Annotated[
        str | None, typer.Option(help="Address that the SuperNode listens on; default: the same.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the SuperNode for the executor.")] = 9094,
    part: Annotated[
        str, typer.Option(help="Process to start: all, supernode or executor.")
    ] = "all",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting of the node, such as numbers=true; may repeat."),
    ] = None,
) -> None:
    """Run a real client until it is stopped."""
    from simulations.deployment.client import plan_of, run_client

    run_client(
        plan_of(
            join,
            superlink,
            data=data,
            state=state,
            host=host,
            bind=bind,
            port=port,
            settings=setting or [],
        ),
        part,
    )
