# SPDX-License-Identifier: Apache-2.0
"""Commands about deployments: `fedrec deploy` and `fedrec client`."""

import os
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from simulations.cli import options
from simulations.deployment import gateway as proxy
from simulations.deployment import layout, operator
from simulations.deployment.layout import RENEWED_DAYS, Deployment, DeploymentConfig
from simulations.deployment.operator import ProcessState
from simulations.deployment.processes import IN_CONTAINER

# Modules that import PyTorch or Flower's messages are imported by the commands that need them.


# `fedrec deploy`: create, start, inspect, use and stop a deployment of real clients.

app = options.group("Deploy on real clients: create, start, run experiments, stop.")


Folder = Annotated[
    Any,
    typer.Argument(
        metavar="FOLDER", parser=lambda folder: Deployment(Path(folder)), help="Deployment folder."
    ),
]
"""Deployment in a folder given as an argument."""


@app.command(
    "init",
    cls=options.command_with(lambda _: DeploymentConfig, "hosts", "revoked"),
    short_help="Create a deployment folder: certificates, keys, settings.",
)
def _init(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Address at which clients reach this machine.")
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="Split the dataset of this experiment into a file per node.")
    ] = None,
    overrides: Annotated[list[str] | None, options.overrides()] = None,
) -> None:
    """Create a deployment folder: authority, certificates, keys, secrets and settings."""
    from fedrec.experiment.schema import load
    from simulations.deployment.shards import cut_for

    table = {**(context.obj or {}), **({"hosts": [*host]} if host else {})}
    settings = DeploymentConfig.parse(table, at="deployment")
    loaded = None if experiment is None else load(experiment, overrides or [])
    made = layout.initialise(folder, settings)
    if loaded is not None:
        cut_for(made, loaded)
    typer.echo(made.path)


@app.command("up", short_help="Start all processes and register the nodes.")
def _up(deployment: Folder) -> None:
    """Start all processes, register the nodes, and wait until all are healthy."""
    operator.up(deployment)
    _show(deployment)
    here = len(operator.local_plans(deployment))
    absent = len(deployment.numbers) - here
    if deployment.settings.local_nodes and absent:
        typer.echo(
            f"{absent} nodes have no data.csv in their folder and are not started here", err=True
        )


@app.command("status", short_help="Show processes, nodes and runs.")
def _status(deployment: Folder) -> None:
    """Show all processes, nodes and runs; the exit status is 1 if one is not healthy."""
    states = _show(deployment)
    if any(state.pid is None or state.healthy is False for state in states):
        raise typer.Exit(1)


@app.command("down")
def _down(deployment: Folder) -> None:
    """Stop all processes that `up` started."""
    stopped = operator.down(deployment)
    typer.echo("stopped" if stopped else "nothing was running")


@app.command("register", short_help="Register the nodes whose keys are in the folder.")
def _register(deployment: Folder) -> None:
    """Register all nodes whose keys are in the deployment folder; `up` also does this."""
    for name, node in operator.register_nodes(deployment).items():
        typer.echo(f"{name} {node}")


@app.command("add-nodes", short_help="Create keys for new nodes.")
def _add_nodes(
    deployment: Folder,
    count: Annotated[
        int, typer.Argument(min=0, help="Number of new nodes; 0 only rewrites .env.")
    ] = 1,
) -> None:
    """Create folders with keys for new nodes; then `register` admits them."""
    grown = layout.add_nodes(deployment, count)
    for made in grown.node_folders()[len(grown.numbers) - count :]:
        typer.echo(made)


@app.command("page", short_help="Serve a read-only page about nodes and runs.")
def _page(
    deployment: Folder,
    bind: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8444,
) -> None:
    """Serve a read-only page about processes, nodes and runs until Ctrl-C, with the gateway's
    certificate. The user is `operator`, the password is in `server/page.secret`."""
    from simulations.deployment import page

    typer.echo(f"https://{bind}:{port}/ user {page.USER}, password in {page.key_file(deployment)}")
    page.serve(deployment, bind, port)


@app.command("gateway", hidden=True)
def _gateway(
    host: Annotated[str, typer.Option()],
    port: Annotated[int, typer.Option()],
    upstream: Annotated[str, typer.Option()],
    certificate: Annotated[Path, typer.Option()],
    key: Annotated[Path, typer.Option()],
    authority: Annotated[Path, typer.Option()],
    nodes: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Run the gateway of a deployment."""
    proxy.serve_over_tls(proxy.create_app(upstream, authority, nodes), host, port, certificate, key)


def _show(deployment: Deployment) -> list[ProcessState]:
    """Print processes, nodes, runs and the certificates' remaining days, and return the
    processes."""
    from server.nodes import with_names
    from simulations.deployment.superlink import Control

    console = Console()

    def show(table):
        printed = Table(*table.heads, title=table.caption)
        for row in table.rows:
            printed.add_row(row.name, *row.cells)
        console.print(printed)

    states = operator.states(deployment)
    show(operator.process_table(states))
    if any(state.name == "superlink" and state.healthy for state in states):
        with Control(deployment) as control:
            show(operator.node_table(control.nodes()))
            names = control.names()
            for run in control.runs()[:10]:
                details = with_names(run.details, names)
                console.print(f"run {run.run}: {run.status}", details, markup=False)
    console.print(f"gateway: {deployment.gateway}")
    left = min(layout.days_of_certificates(deployment).values())
    late = f"; fedrec deploy renew {quote(str(deployment.path))}" if left < RENEWED_DAYS else ""
    console.print(f"certificates: {left:.0f} days left{late}", highlight=False, soft_wrap=True)
    return states


@app.command("run", short_help="Run an experiment on the nodes.")
def _run(
    deployment: Folder,
    experiment: options.Named,
    overrides: Annotated[list[str] | None, options.overrides()] = None,
    output: options.RunOutput = None,
) -> None:
    """Run an experiment on the nodes of a deployment, and wait until it ends."""
    from fedrec.runs.folder import RunFolder
    from fedrec.runs.ids import default_folder
    from simulations.deployment import launch

    settled = launch.settled(experiment, overrides or [])
    default = default_folder(settled)
    path = output or (
        default if "FEDREC_RUNS" in os.environ else deployment.path / "runs" / default.name
    )
    _follow(deployment, RunFolder.create(settled, path))


@app.command("resume", short_help="Continue a run from its newest checkpoint.")
def _resume(
    deployment: Folder,
    run_folder: Annotated[Path, typer.Argument(help="Folder of an interrupted run.")],
) -> None:
    """Continue a run from its newest checkpoint, and wait until it ends."""
    from simulations.deployment import launch

    _follow(deployment, launch.resumable(run_folder))


@app.command("stop", short_help="Stop a run; it can be resumed.")
def _stop(
    deployment: Folder,
    run: Annotated[int, typer.Argument(help="Id of a run, as shown by `status`.")],
) -> None:
    """Stop a run; its reported rounds remain, and it can be resumed."""
    from simulations.deployment.superlink import Control

    with Control(deployment) as control:
        control.stop(run)


def _follow(deployment, run_folder) -> None:
    from server.callbacks import Progress
    from simulations.cli.run import print_table
    from simulations.deployment import launch

    identifier = launch.start(deployment, run_folder)
    typer.echo(f"run {identifier}: {run_folder.path}", err=True)
    with closing(Progress()) as progress:
        result = launch.wait(deployment, run_folder, identifier, callback=progress)
    print_table(result)
    # a container writes only into its volumes
    name = quote(str(result.folder))
    output = f"{name}/report.html" if os.environ.get(IN_CONTAINER) else "report.html"
    typer.echo(f"Next:\n  fedrec report {name} -o {output}\nRun folder:", err=True)
    typer.echo(result.folder)


# `fedrec client`: one real client on its own data.


def client(
    join: Annotated[
        Path, typer.Option(help="Folder from the operator: node.key, ca.crt, catalogue.json.")
    ],
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the deployment's gateway.")],
    data: Annotated[
        Path | None, typer.Option(help="CSV file of users; it never leaves this machine.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Folder of the private state; default: JOIN/state.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address at which the executor reaches the SuperNode.")
    ] = "127.0.0.1",
    bind: Annotated[
        str | None, typer.Option(help="Address that the SuperNode listens on; default: the same.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the SuperNode for the executor.")] = 9094,
    part: Annotated[str, typer.Option(help="Process: all, supernode or executor.")] = "all",
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the node, such as numbers=true.")
    ] = None,
) -> None:
    """Run a real client until it is stopped."""
    from simulations.deployment.client import ClientPlan, run_client

    given = setting or []
    plan = ClientPlan(
        join, superlink, data=data, state=state, host=host, bind=bind, port=port, settings=given
    )
    run_client(plan, part)


# `fedrec deploy renew` and `revoke`: new certificates, and revoked keys.


@app.command("renew", short_help="Renew the certificates, with the same keys.")
def _renew(deployment: Folder) -> None:
    """Renew the certificates of SuperLink, gateway and nodes for 825 days, with the same keys."""
    files = layout.renew(deployment)
    folder = quote(str(deployment.path))
    typer.echo(
        f"Next:\n  fedrec deploy down {folder}; fedrec deploy up {folder}\n"
        "and transfer these certificates, which are not secret, to the nodes:",
        err=True,
    )
    for file in files:
        typer.echo(file)


@app.command("revoke", short_help="Revoke a node's keys.")
def _revoke(
    deployment: Folder,
    node: Annotated[str, typer.Argument(help="Name of the node's folder, such as node-3.")],
) -> None:
    """Revoke a node's keys, for example because they were stolen."""
    changed = layout.revoke(deployment, node)
    if operator.supervisor_of(changed) is not None:
        operator.register_nodes(changed)
        typer.echo(f"{node} is revoked")
    else:
        typer.echo(f"{node} is revoked from the next `fedrec deploy up` or `register`")
    typer.echo(
        f"Transfer {changed.revoked} to the folders of the other nodes, which then refuse its"
        " certificate in secure aggregation, too.",
        err=True,
    )
