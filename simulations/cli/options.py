# SPDX-License-Identifier: Apache-2.0
"""Options and arguments that several commands share, and options that stand for settings.

Meaning, type, range and default of an option for a setting are those of the setting. Of single
settings (`setting_option`) they are looked up when the help is printed, because importing the
settings takes longer than a help text may.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import click
import typer
import typer.core

if TYPE_CHECKING:
    from fedrec.components.settings import Setting
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

    from fedrec.components.settings import settings_of

    one = next(one for one in settings_of(resolve_name(where)) if one.key == key)
    default = "" if one.default in ("", "required") else f"default: {one.default}"
    form = ", ".join(part for part in (one.type, one.range, default) if part)
    return f"{one.about} ({form})"


def options_of(config: type[Config]) -> Iterator[click.Option]:
    """An option for each setting of a component that is no table, with the same name, type,
    description and default. What is given is in `ctx.obj`, as in TOML."""
    from fedrec.components.settings import settings_of

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
