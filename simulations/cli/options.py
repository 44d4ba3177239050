# SPDX-License-Identifier: Apache-2.0
"""Options and arguments that several commands share, and their help texts.

Options and arguments that several commands share, and options that stand for settings.

Meaning, type, range and default of an option for a setting are those of the setting. Of single
settings (`setting_option`) they are looked up when the help is printed, because importing the
settings takes longer than a help text may.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import click
import typer
import typer.core
from typer.models import ArgumentInfo

if TYPE_CHECKING:
    from fedrec.components.registry import Setting
    from fedrec.config import Config


_EXPERIMENT = "fedrec.experiment.schema:Experiment"
_TYPES = {bool: click.BOOL, int: click.INT, float: click.FLOAT}


def overrides(about: str = "Override a key of the experiment.") -> Any:
    """`--set`, with a help text."""
    return typer.Option("--set", "-s", help=about)


def output(about: str) -> Any:
    """`--output`, with a help text."""
    return typer.Option("--output", "-o", help=about, parser=_path_of, metavar="PATH")


def _path_of(text: str) -> Path:
    from fedrec.errors import ExperimentError

    if not text:  # as an empty variable of a shell; a path of it is the current folder
        raise ExperimentError(
            "the path of --output is empty",
            expected="a path, such as runs/films, or . for the current folder",
            got="an empty text",
            fix="give a path, or leave out --output",
        )
    return Path(text)


def quiet(about: str) -> Any:
    """`--quiet`, with a help text."""
    return typer.Option("--quiet", "-q", help=about)


def workers(what: str) -> Any:
    """`--workers`, of runs or tasks."""
    return typer.Option(min=1, help=f"Number of parallel {what}; more than 1 use Ray.")


Named = Annotated[
    str,
    typer.Argument(metavar="EXPERIMENT", help="A TOML file, or the name of a shipped experiment."),
]
RunOutput = Annotated[Path | None, output("Run folder: new or empty.")]
Quiet = Annotated[bool, quiet("Print only the run folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only one JSON object.")]


def setting_option(key: str, *flags: str, of: str = _EXPERIMENT) -> Any:
    """An option for a setting. Its value is a text, as in `--set KEY=VALUE`, which the setting's
    class checks.

    Args:
        key: of the setting, such as `engine.nodes`.
        flags: names of the option; default: that of the parameter.
        of: the configuration class, as `package.module:Class`.
    """
    return typer.Option(*flags, metavar="VALUE", help=f"{of} {key}")


def overrides_of(values: dict[str, str | None]) -> list[str]:
    """The options that were given, by the keys of their settings, as texts for `--set`."""
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def look_up_help(option: click.Parameter) -> None:
    """Let an option of a setting look up its help text when it is printed."""
    if not isinstance(option, typer.core.TyperOption) or option.metavar != "VALUE":
        return

    def record(ctx: click.Context) -> tuple[str, str] | None:
        where, _, key = (option.help or "").partition(" ")
        if ":" in where:
            option.help = _help_of(where, key)
        return type(option).get_help_record(option, ctx)

    option.get_help_record = record  # type: ignore[method-assign]


def _help_of(where: str, key: str) -> str:
    from pkgutil import resolve_name

    from fedrec.components.registry import settings_of

    one = next(one for one in settings_of(resolve_name(where)) if one.key == key)
    default = "" if one.default in ("", "required") else f"default: {one.default}"
    form = ", ".join(part for part in (one.type, one.range, default) if part)
    return f"{one.about} ({form})"


def options_of(config: type[Config]) -> Iterator[click.Option]:
    """An option for each setting of a component that is no table, with the same name, type,
    description and default. What is given is in `ctx.obj`, as in TOML."""
    from fedrec.components.registry import settings_of

    for setting, field in zip(
        settings_of(config, nested=False), config.model_fields.values(), strict=True
    ):
        if setting.type != "table":
            yield _option(setting, field.annotation)


def _option(setting: Setting, annotation: Any) -> click.Option:
    key = setting.key
    parts = [annotation, *get_args(annotation)]
    kind = next((_TYPES[part] for part in parts if part in _TYPES), click.STRING)
    if get_origin(annotation) is Literal:
        kind = click.Choice(get_args(annotation))
    shown = setting.default.replace('"', "")
    default = {"required": "  [required]", "": "", "[]": "", "false": ""}.get(
        shown, f"  [default: {shown}]"
    )
    bounds = f"  [{setting.range}]" if setting.range else ""
    return typer.core.TyperOption(
        param_decls=[f"--{key}/--no-{key}" if annotation is bool else f"--{key}"],
        help=setting.about + default + bounds,
        multiple=get_origin(annotation) is tuple,
        default=None,
        expose_value=False,
        callback=_keep,
        type=kind,
    )


def _keep(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    given = ctx.ensure_object(dict)
    if value is not None and value != ():
        key = str(option.name).replace("_", "-")
        given[key] = list(value) if isinstance(value, tuple) else value


# Help texts of arguments, which typer 0.20 loses together with click 8.5: click's argument has a
# help text of its own since then, and overwrites typer's with None.


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
