# SPDX-License-Identifier: Apache-2.0
"""Options that set one setting. Meaning, type, range and default are those of the setting; they are
looked up when the help is printed, because importing the settings takes longer than a help text
may."""

from __future__ import annotations

from typing import Any

import click
import typer
import typer.core

_EXPERIMENT = "fedrec.experiment.schema:Experiment"


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
    import importlib

    from fedrec.components.settings import settings_of

    module, _, name = where.partition(":")
    settings = settings_of(getattr(importlib.import_module(module), name))
    one = next(one for one in settings if one.key == key)
    default = "" if one.default in ("", "required") else f"default: {one.default}"
    form = ", ".join(part for part in (one.type, one.range, default) if part)
    return f"{one.about} ({form})"
