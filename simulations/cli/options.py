# SPDX-License-Identifier: Apache-2.0
"""Shared options and arguments, options for settings, and commands made of functions. Description,
type, range and default of an option for a setting are those of the setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import click
import typer
import typer.core

from fedrec.errors import ExperimentError

if TYPE_CHECKING:
    from rich.console import Console

    from fedrec.components.registry import Setting
    from fedrec.config import Config


_TYPES = {bool: click.BOOL, int: click.INT, float: click.FLOAT}


class _Argument(typer.core.TyperArgument):
    """Argument with a help text, which click since 8.5 would overwrite with None under typer
    0.20."""

    def __init__(self, *, help: str | None = None, **options: Any) -> None:
        super().__init__(help=help, **options)
        self.help = help


typer.main.TyperArgument = _Argument  # type: ignore[misc]
# typer lists arguments among the options, so click need not list them before
typer.core.TyperCommand.format_arguments = lambda *_: None  # type: ignore[method-assign]
typer.core.HAS_RICH = False  # nothing here removes the backslashes that it has typer write


def group(about: str, **more: Any) -> typer.Typer:
    """Typer application for a group of commands."""
    quiet = {"add_completion": False, "rich_markup_mode": None}
    return typer.Typer(help=about, no_args_is_help=True, **quiet, **more)  # type: ignore[arg-type]


def command_of(
    source: Callable[..., Any] | typer.Typer | click.Command,
    name: str,
    short_help: str,
    **more: Any,
) -> click.Command:
    """Click command or group of commands.

    Args:
        source: a function with typer annotations, or a group.
        name: name of the command.
        short_help: one line about it.
        more: `cls` and `help` of a function's command.
    """
    if isinstance(source, click.Command):
        return source
    if isinstance(source, typer.Typer):
        app = source
    else:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name, short_help=short_help, **more)(source)
    command = typer.main.get_command(app)
    command.name = name
    return command


def overrides(about: str = "Override a key of the experiment.") -> Any:
    """Option `--set` with a help text."""
    return typer.Option("--set", "-s", help=about)


def output(about: str) -> Any:
    """Option `--output` with a help text."""
    return typer.Option("--output", "-o", help=about, parser=_path_of, metavar="PATH")


def _path_of(text: str) -> Path:
    if not text:  # for example an empty shell variable; Path("") would be the current folder
        raise ExperimentError(
            "the path of --output is empty",
            expected="a path, such as runs/films, or . for the current folder",
            fix="give a path, or leave out --output",
        )
    return Path(text)


def check_suffix(output: Path, *suffixes: str) -> None:
    """Check that an output file ends as one of the formats.

    Raises:
        ExperimentError: it ends otherwise, or is a folder.
    """
    if output.is_dir() or output.suffix.lower() not in suffixes:
        raise ExperimentError(
            f"cannot write to {output}",
            expected=f"a file that ends in {' or '.join(suffixes)}",
            got="a folder" if output.is_dir() else output.suffix or "no extension",
            fix=f"--output {output.with_suffix(suffixes[0]).name}",
        )


def quiet(about: str) -> Any:
    """Option `--quiet` with a help text."""
    return typer.Option("--quiet", "-q", help=about)


def workers(what: str) -> Any:
    """Option `--workers` for runs or tasks."""
    return typer.Option(min=1, help=f"Number of parallel {what}; more than 1 use Ray.")


Named = Annotated[
    str,
    typer.Argument(metavar="EXPERIMENT", help="A TOML file, or the name of a shipped experiment."),
]
Engine = Annotated[
    str | None, typer.Option(help="Engine that runs the nodes: serial, ray or flower.")
]
RunOutput = Annotated[Path | None, output("Run folder: new or empty.")]
Quiet = Annotated[bool, quiet("Print only the run folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def with_options(overrides: list[str] | None, options: Mapping[str, str | None]) -> list[str]:
    """Overrides, and as further ones the options that have a value, by the keys of their
    settings."""
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return [*(overrides or []), *given]


def _options_of(config: type[Config]) -> Iterator[click.Option]:
    """Options for the settings of a component except tables, with the same names, types,
    descriptions and defaults. The given values are in `ctx.obj`, as in TOML."""
    from fedrec.components.registry import settings_of

    for setting, field in zip(
        settings_of(config, nested=False), config.model_fields.values(), strict=True
    ):
        if setting.type != "table":
            yield _option(setting, field.annotation)


def command_with(config_of: Callable[[str], type[Config]], *computed: str) -> Any:
    """Class of commands with options for the settings of a configuration class, see `_options_of`.

    Args:
        config_of: returns the class from the command's name.
        computed: names of settings without an option.
    """

    class SettingsCommand(typer.core.TyperCommand):
        def get_params(self, ctx: click.Context) -> list[click.Parameter]:
            first, *others = super().get_params(ctx)
            options = _options_of(config_of(str(self.name)))
            asked = (option for option in options if option.name not in computed)
            return [first, *asked, *others]

    return SettingsCommand


def _option(setting: Setting, annotation: Any) -> click.Option:
    key = setting.key
    types = [annotation, *get_args(annotation)]
    kind = next((_TYPES[type_] for type_ in types if type_ in _TYPES), click.STRING)
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
    values = ctx.ensure_object(dict)
    if value is not None and value != ():
        key = str(option.name).replace("_", "-")
        values[key] = list(value) if isinstance(value, tuple) else value


@contextmanager
def interruptible(how: str) -> Iterator[None]:
    """On Ctrl-C, print how to continue the work, and exit with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.secho(f"\ninterrupted; {how}", err=True)
        raise typer.Exit(130) from None


def wide_console(width: int) -> Console:
    """Console for tables, `width` columns wide in a file or a pipe."""
    from rich.console import Console  # `fedrec --help` does without it

    console = Console()
    return console if console.is_terminal else Console(width=width)
