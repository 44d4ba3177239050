# SPDX-License-Identifier: Apache-2.0
"""`fedrec client`: one real client on its own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def client(
    join: Annotated[
        Path,
        typer.Option(
            help="Folder that the operator handed over: node.key, ca.crt, catalogue.json."
        ),
    ],
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the deployment.")],
    data: Annotated[
        Path | None, typer.Option(help="CSV of one or more users; it never leaves this machine.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Folder of what is kept; default: JOIN/state.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address on which the two processes meet.")
    ] = "127.0.0.1",
    bind: Annotated[
        str | None, typer.Option(help="Address to listen on for that; default: the same.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port on which they meet.")] = 9094,
    part: Annotated[str, typer.Option(help="all, supernode or executor.")] = "all",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the node, such as numbers=true; may repeat."),
    ] = None,
) -> None:
    """Start a real client, and run it until it is stopped."""
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
