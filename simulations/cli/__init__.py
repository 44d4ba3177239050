# SPDX-License-Identifier: Apache-2.0
"""The command line. Commands import what they need when they run, so that `fedrec --help` answers
at once."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from fedrec.errors import FedrecError
from simulations.cli import doctor
from simulations.cli.attacks import attribute, audit, membership, named
from simulations.cli.data import datasets, glove, perturb, synthesise
from simulations.cli.deployment import client, deploy
from simulations.cli.experiments import (
    compare,
    demo,
    listing,
    new,
    own_data,
    recommend,
    report,
    reproduce,
    run,
    sweep,
)
from simulations.cli.help_texts import command_of
from simulations.cli.privacy import accounting, personal
from simulations.telemetry import disable_telemetry

app = typer.Typer(
    help="Federated recommender systems with differential privacy: simulate, measure, deploy.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("try")(own_data.try_)
app.command("resume")(run.resume)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("demo")(demo.demo)
app.command("recommend")(recommend.recommend)
app.command("sweep")(sweep.sweep)
app.command("reproduce")(reproduce.reproduce)
app.command("list")(listing.list_components)
app.command("new")(new.new)
app.add_typer(datasets.app, name="data", help="List, fetch, import and inspect datasets.")
app.add_typer(
    accounting.app,
    name="privacy",
    help="Differential privacy: epsilon of a run, noise for a target, explanations.",
)
datasets.app.command("glove-subset")(glove.glove_subset)
accounting.app.command("users")(personal.users)
app.add_typer(membership.app, name="attack", help="Membership and attribute inference attacks.")
membership.app.command("attribute")(attribute.attribute)
membership.app.command("run")(named.run)
app.command("audit")(audit.audit)
app.add_typer(
    deploy.app,
    name="deploy",
    help="Deployments on real clients: create, start, inspect, run experiments, stop.",
)
app.command("client")(client.client)
app.command("perturb")(perturb.perturb)
app.command("synthesise")(synthesise.synthesise)
app.command("doctor")(doctor.doctor)

DEBUG = "FEDREC_DEBUG"


def _version(wanted: bool) -> None:
    if wanted:
        import fedrec

        typer.echo(f"fedrec {fedrec.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the full traceback of an error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


def main() -> None:
    """Entry point: an error that the user can fix is printed without a traceback, with a non-zero
    exit."""
    disable_telemetry(os.environ)
    try:
        with _warnings_shown():
            command_of(app)()
    except FedrecError as error:
        if os.environ.get(DEBUG):
            raise
        typer.secho(f"error: {error.text()}", fg=typer.colors.RED, err=True)
        sys.exit(error.exit_code)


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Warnings (a damaged checkpoint, a failed node) go to standard error too; errors are printed
    once, by `main`."""
    logger, handler = logging.getLogger("fedrec"), logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno == logging.WARNING)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
