# SPDX-License-Identifier: Apache-2.0
"""Commands `fedrec attack NAME EXPERIMENT` for all attacks, also from plug-ins, and `fedrec audit`.
An attack's settings are options of its command."""

import inspect
import json
from contextlib import closing
from pathlib import Path
from typing import Annotated

import click
import typer
import typer.core
from rich.console import Console
from rich.table import Table

from fedrec.components.registry import ATTACK, available_names, resolve
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.runs.ids import default_folder
from server.callbacks import Progress
from simulations.attacks.base import AttackOutcome, run_attack
from simulations.cli import options
from simulations.cli.options import AsJson, Engine, Named, command_of, command_with, with_options

_AUDIT = """Run an experiment with canary clients and test its privacy claim; the exit status is 1
on FAIL.

The claim is that of the run's privacy ledger, for each phase.
"""
_FOLDER = "Folder of the runs; finished runs are reused."
_COLOURS = {"PASS": typer.colors.GREEN, "WARN": typer.colors.YELLOW, "FAIL": typer.colors.RED}


def _attack(
    ctx: typer.Context,
    experiment: Named,
    overrides: Annotated[
        list[str] | None, options.overrides("Override a key: --set rounds=20")
    ] = None,
    engine: Engine = None,
    output: Annotated[Path | None, options.output(_FOLDER)] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, options.quiet("Hide progress.")] = False,
) -> None:
    """Attack an experiment; the exit status is 1 if a claim is refuted."""
    name = str(ctx.command.name)
    loaded = load(experiment, with_options(overrides, {"engine.name": engine}))
    default = default_folder(loaded)
    folder = output or default.with_name(f"{name.rpartition(':')[2]}-{default.name}")
    with closing(Progress()) as progress:
        callbacks = [] if quiet or as_json else [progress]
        outcome = run_attack(loaded, {**(ctx.obj or {}), "name": name}, folder, callbacks)
    if as_json:
        typer.echo(json.dumps(outcome.table, indent=2))
    else:
        _print(outcome, folder)
    if outcome.verdict == "FAIL":
        raise typer.Exit(1)


def _print(outcome: AttackOutcome, folder: Path) -> None:
    titles, *rows = outcome.rows
    shown = Table(box=None, padding=(0, 2, 0, 0))
    for title, *cells in zip(titles, *rows, strict=True):
        words = all(cell[:1].isalpha() for cell in cells if cell)
        shown.add_column(title, justify="left" if words else "right")
    for row in rows:
        shown.add_row(*row)
    console = Console()
    console.print(shown)
    for line in outcome.lines:
        console.print(line, highlight=False)
    typer.echo(folder)
    if outcome.verdict:
        colour = _COLOURS[outcome.verdict]
        typer.secho(outcome.verdict, fg=colour, bold=True)
        for reason in outcome.reasons:
            typer.secho(f"  {reason}", fg=colour, err=outcome.verdict == "FAIL")


_AttackCommand = command_with(lambda name: resolve(ATTACK, name).Config)


class _AttackGroup(typer.core.TyperGroup):
    """Group with a command for each attack."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the attacks."""
        return available_names(ATTACK)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Command of an attack by name or by module and class; an unknown or broken attack has a
        command that raises its error."""
        try:
            about = inspect.getdoc(resolve(ATTACK, cmd_name)) or ""
        except ExperimentError as error:
            return _broken(cmd_name, error)
        short = " ".join(about.partition("\n\n")[0].split())
        return command_of(_attack, cmd_name, short, cls=_AttackCommand, help=about)


def _broken(name: str, error: ExperimentError) -> click.Command:
    """Command that raises an error for any arguments."""

    def fail() -> None:
        raise error

    lenient = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    about = f"BROKEN: {error.problem}"
    return click.Command(name, context_settings=lenient, callback=fail, short_help=about)


app = options.group(
    "Run membership and attribute inference attacks, and audits.",
    cls=_AttackGroup,
    callback=lambda: None,
)
audit = command_of(_attack, "audit", "Test a privacy claim.", cls=_AttackCommand, help=_AUDIT)
