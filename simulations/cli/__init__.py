# SPDX-License-Identifier: Apache-2.0
"""The command line. Commands import what they need when they run, so that `fedrec --help` answers
at once."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from fedrec.errors import DataError, FedrecError, RunError
from simulations.cli import (
    attacks,
    data,
    deploy,
    doctor,
    listing,
    privacy,
    reproduce,
    results,
    run,
    sweep,
)
from simulations.cli.data import split
from simulations.cli.options import GroupedCommands, command_of
from simulations.flower_commands import disable_telemetry

app = typer.Typer(
    cls=GroupedCommands,
    help="Federated recommender systems with differential privacy: simulate, measure, deploy.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
RUN = "Run"
COMPARE = "Compare and report"
DATA = "Data"
PRIVACY = "Privacy"
DEPLOYMENT = "Deployment"
EXTEND = "Components and installation"
START = """fedrec demo                     PrivRec, without and with privacy, on synthetic data
fedrec try ratings.csv          a federated recommender on your own table
fedrec run privrec-synthetic    a shipped experiment; fedrec list experiment names all
fedrec report RUN -o page.html  an HTML report of a run
fedrec --help                   all commands"""

app.command("run", rich_help_panel=RUN, short_help="Run an experiment.")(run.run)
app.command(
    "try", rich_help_panel=RUN, short_help="Train a federated recommender on your own table."
)(run.try_)
app.command("demo", rich_help_panel=RUN, short_help="PrivRec beside others; no data needed.")(
    run.demo
)
app.command("resume", rich_help_panel=RUN, short_help="Continue a run or a sweep.")(run.resume)
app.command(
    "sweep", rich_help_panel=RUN, short_help="Run an experiment with many settings and seeds."
)(sweep.sweep)
app.command("reproduce", rich_help_panel=RUN, short_help="Reproduce a table or figure of a paper.")(
    reproduce.reproduce
)
app.command(
    "compare", rich_help_panel=COMPARE, short_help="Compare systems by paired tests over users."
)(results.compare)
app.command("report", rich_help_panel=COMPARE, short_help="Write an HTML report of runs.")(
    results.report
)
app.command(
    "recommend",
    rich_help_panel=COMPARE,
    short_help="Recommend new items with the model of a finished run.",
)(results.recommend)
app.command(
    "export", rich_help_panel=COMPARE, short_help="Write a finished run's model for devices (ONNX)."
)(results.export)
app.add_typer(
    data.app,
    name="data",
    rich_help_panel=DATA,
    help="List, fetch, import and inspect datasets.",
)
data.app.command("split", short_help="Write the rows of a run and the part of each.")(split)
data.app.command("glove-subset", short_help="Extract the GloVe vectors of users' metadata.")(
    data.glove_subset
)
app.command(
    "perturb",
    rich_help_panel=DATA,
    short_help="Apply an experiment's perturbation without training.",
)(data.perturb)
app.command(
    "synthesise",
    rich_help_panel=DATA,
    short_help="Write synthetic training rows, and measure what they reveal.",
)(data.synthesise)
app.add_typer(
    privacy.app,
    name="privacy",
    rich_help_panel=PRIVACY,
    help="Epsilon of a run, noise for a target, explanations.",
)
privacy.app.command("users", short_help="Compute each user's epsilon.")(privacy.users)
app.add_typer(
    attacks.app,
    name="attack",
    rich_help_panel=PRIVACY,
    help="Membership and attribute inference attacks.",
)
app.command(
    "audit",
    cls=attacks.AttackCommand,
    rich_help_panel=PRIVACY,
    help=attacks.AUDIT,
    short_help="Test the privacy claim of an experiment with canary clients.",
)(attacks.attack)
app.add_typer(
    deploy.app,
    name="deploy",
    rich_help_panel=DEPLOYMENT,
    help="Deploy on real clients: create, start, run experiments, stop.",
)
deploy.app.command("renew", short_help="Replace the certificates by new ones for the same keys.")(
    deploy.renew
)
deploy.app.command("revoke", short_help="Refuse the keys of a node from now on.")(deploy.revoke)
app.command("client", rich_help_panel=DEPLOYMENT)(deploy.client)
app.command(
    "list",
    rich_help_panel=EXTEND,
    short_help="List components and experiments, or the settings of one.",
)(listing.list_components)
app.command(
    "new",
    rich_help_panel=EXTEND,
    short_help="Create a component of your own and its test.",
)(results.new)
app.command("doctor", rich_help_panel=EXTEND, short_help="Check the installation.")(doctor.doctor)

DEBUG = "FEDREC_DEBUG"
_OF_DISKS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT)  # also where no file is named


def _version(wanted: bool) -> None:
    if wanted:
        import fedrec

        typer.echo(f"fedrec {fedrec.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    context: typer.Context,
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
    if context.invoked_subcommand is None:
        typer.echo(START)


def main() -> None:
    """Entry point: an error that the user can fix is printed without a traceback, with a non-zero
    exit."""
    disable_telemetry(os.environ)
    try:
        with _warnings_shown(), _unusable_files_told():
            command_of(app)()
    except FedrecError as error:
        if os.environ.get(DEBUG):
            raise
        typer.secho(f"error: {error.text()}", fg=typer.colors.RED, err=True)
        sys.exit(error.exit_code)


@contextmanager
def _unusable_files_told() -> Iterator[None]:
    """A path that the operating system does not allow, because it is too long, has a zero byte or
    leads through a file, is one of the command's arguments. A file that cannot be read or written
    is one that somebody has removed, replaced or protected."""
    try:
        yield
    except OSError as error:
        name = f"{str(error.filename)[:100]!r}"
        problem = {errno.ENAMETOOLONG: "is too long", errno.ENOTDIR: "leads through a file"}
        if os.environ.get(DEBUG) or (error.filename is None and error.errno not in _OF_DISKS):
            raise
        if error.errno in problem:
            raise _impossible(problem[error.errno], name) from None
        raise RunError(
            "a file or folder cannot be used",
            expected="files and folders that can be read and written, and free space",
            got=f"{error.strerror}" + (f": {name}" if error.filename is not None else ""),
            fix="check its name, its permissions and its disk",
        ) from None
    except ValueError as error:
        if "embedded null" not in str(error):  # Python's text for paths with a zero byte
            raise
        raise _impossible("has a zero byte", str(error)) from None


def _impossible(problem: str, got: str) -> DataError:
    return DataError(
        f"a path {problem}",
        expected="a file or folder with a name that this system allows",
        got=got,
        fix="choose another one",
    )


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Warnings (a damaged checkpoint, a failed node) go to standard error too, each text once,
    however many runs a command has; errors are printed by `main`."""
    logger = logging.getLogger("fedrec")
    handler = logging.StreamHandler()
    shown = set[str]()

    def new_warning(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        known = record.levelno != logging.WARNING or text in shown
        shown.add(text)
        return not known

    handler.addFilter(new_warning)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
