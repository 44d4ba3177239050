# SPDX-License-Identifier: Apache-2.0
"""Help texts of arguments, which typer 0.20 loses together with click 8.5: click's argument has a
help text of its own since then, and overwrites typer's with None."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import click
import typer
import typer.core
from typer.models import ArgumentInfo

from simulations.cli.options import look_up_help


class GroupedCommands(typer.core.TyperGroup):
    """A group whose help lists its commands by their panels (`rich_help_panel`), in the order in
    which these were added."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each panel."""
        panels: dict[str, list[click.Command]] = {}
        for command in self.commands.values():
            if not command.hidden:
                panels.setdefault(_panel(command), []).append(command)
        width = max(map(len, self.commands))
        for panel, commands in panels.items():
            with formatter.section(panel):
                limit = formatter.width - 6 - width
                formatter.write_dl(
                    [(f"{one.name:<{width}}", one.get_short_help_str(limit)) for one in commands]
                )


def _panel(command: click.Command) -> str:
    panel = getattr(command, "rich_help_panel", None)
    return panel if isinstance(panel, str) else "Commands"


def command_of(app: typer.Typer) -> click.Command:
    """The command line of an application, with a help text for each argument that declares one, and
    without the backslashes that typer writes before brackets for rich's markup."""
    typer.core.HAS_RICH = False  # no markup is printed here, so nothing would remove them
    command = typer.main.get_command(app)
    _restore(command)
    return command


def _restore(command: click.Command) -> None:
    for one in getattr(command, "commands", {}).values():
        _restore(one)
    declared = _declared(command.callback) if command.callback else {}
    for parameter in command.params:
        if isinstance(parameter, typer.core.TyperArgument) and parameter.help is None:
            parameter.help = declared.get(parameter.name)
        look_up_help(parameter)
    command.format_arguments = _left_to_typer  # type: ignore[attr-defined]


def _declared(function: Callable[..., Any]) -> dict[str | None, str | None]:
    """Help texts of a function's arguments by name."""
    found: dict[str | None, str | None] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        for info in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(info, ArgumentInfo):
                found[name] = info.help
    return found


def _left_to_typer(ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """As click's, but without arguments that have a help text, which it would print a second
    time."""
