# SPDX-License-Identifier: Apache-2.0
"""The command line: a command's module is imported when it runs, so that `fedrec --help` is
fast."""

import errno
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Annotated

import click
import typer
import typer.core

from fedrec.errors import FedrecError, RunError
from simulations.cli.options import command_of
from simulations.flower_commands import disable_telemetry

_GROUPS = {
    "Run": {
        "run": ("run:run", "Run an experiment, or a recommender on your own table."),
        "demo": ("run:demo", "Compare PrivRec with other systems; no data needed."),
        "resume": ("run:resume", "Continue a run or a sweep."),
        "sweep": ("studies:sweep", "Run an experiment with many settings and seeds."),
        "reproduce": ("studies:reproduce", "Reproduce a table or figure of a paper."),
    },
    "Compare and report": {
        "compare": ("results:compare", "Compare systems by paired tests over users."),
        "report": ("results:report", "Write an HTML report of runs."),
        "recommend": ("results:recommend", "Recommend new items with the model of a finished run."),
        "export": ("results:export", "Write a finished run's model for devices (ONNX)."),
    },
    "Data": {
        "data": ("data:app", "List, fetch, import and inspect datasets; write a run's split."),
        "perturb": ("data:perturb", "Apply an experiment's perturbation without training."),
        "synthesise": (
            "data:synthesise",
            "Write synthetic training rows, and measure what they reveal.",
        ),
    },
    "Privacy": {
        "privacy": ("privacy:app", "Compute epsilons and noise, and explain guarantees."),
        "attack": ("attacks:app", "Run membership and attribute inference attacks."),
        "audit": ("attacks:audit", "Test the privacy claim of an experiment with canary clients."),
    },
    "Deployment": {
        "deploy": ("deploy:app", "Deploy on real clients: create, start, run experiments, stop."),
        "client": ("deploy:client", "Run a real client until it is stopped."),
    },
    "Components and installation": {
        "list": ("components:show", "List components and experiments, or the settings of one."),
        "new": ("components:new", "Create a new component and its test."),
        "doctor": ("doctor:doctor", "Check the installation."),
    },
}
"""Commands by their heading in the help: function or group, and a one-line description."""
START = """fedrec demo                     PrivRec, without and with privacy, on synthetic data
fedrec run --data ratings.csv   a federated recommender on your own table
fedrec run privrec-synthetic    a shipped experiment; fedrec list experiment names all
fedrec report RUN -o page.html  an HTML report of a run
fedrec --help                   all commands"""


class _Commands(typer.core.TyperGroup):
    """All commands, listed in groups by the help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of the help."""
        return [name for group in _GROUPS.values() for name in group]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if it is unknown."""
        for group in _GROUPS.values():
            if cmd_name in group:
                path, about = group[cmd_name]
                gc.disable()  # a quarter of the start would be spent on looking at all modules
                try:
                    command = resolve_name(f"simulations.cli.{path}")
                    gc.freeze()  # and the work after it looks at them no more
                finally:
                    gc.enable()
                return command_of(command, cmd_name, about)
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each group."""
        width = max(map(len, self.list_commands(ctx)))
        for title, group in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", group[name][1]) for name in group])


app = typer.Typer(
    cls=_Commands,
    help="Federated recommender systems with differential privacy: simulate, measure, deploy.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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
    """Entry point; print errors that the user can fix without a traceback, with a non-zero exit."""
    disable_telemetry(os.environ)
    try:
        with _warnings_shown(), _unusable_files_told():
            app()
    except FedrecError as error:
        if os.environ.get(DEBUG):
            raise
        typer.secho(f"error: {error.text()}", fg=typer.colors.RED, err=True)
        sys.exit(error.exit_code)


@contextmanager
def _unusable_files_told() -> Iterator[None]:
    """Turn the operating system's errors about files (missing, protected, on a full disk, with an
    impossible path) into an error that the user can fix."""
    try:
        yield
    except (OSError, ValueError) as error:
        name = getattr(error, "filename", None)
        of_files = name is not None or getattr(error, "errno", None) in _OF_DISKS
        zero_byte = "embedded null" in str(error)  # Python's text for paths with one
        if os.environ.get(DEBUG) or not (of_files or zero_byte):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise RunError(
            "a file or folder cannot be used",
            got=reason + (f": {str(name)[:100]!r}" if name is not None else ""),
            fix="check its name, its permissions and its disk",
        ) from None


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Print warnings (a damaged checkpoint, a failed node) to standard error, each text once per
    command; errors are printed by `main`."""
    logger = logging.getLogger("fedrec")
    handler = logging.StreamHandler()
    shown = set[str]()

    def _is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        known = record.levelno != logging.WARNING or text in shown
        shown.add(text)
        return not known

    handler.addFilter(_is_new)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
